"""In which order a rank of a pipeline runs forwards and backwards of its micro-batches.

    gpipe        all forwards, then all backwards (Huang et al. 2019)
    1f1b         p − r forwards ahead on rank r of p, then a backward for each forward (Narayanan et al. 2021, section 2.2)
    interleaved  the same with several parts of the model on a rank, taken in turns of p micro-batches (ibid.)
    zero-bubble  1f1b whose backward is split: gradients of weights are made r micro-batches after those of inputs (ZB-H1, Qi et al. 2023)

These are the orders of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weights"


class Action(NamedTuple):
    """What a rank does next.

    Attributes:
        kind: ``"forward"``, ``"backward"`` (of inputs alone, where weights come later), ``"weights"``.
        part: of the parts of the model that the rank holds.
        micro_batch: which one.
    """

    kind: str
    part: int
    micro_batch: int


def actions(schedule: str, rank: int, ranks: int, micro_batches: int, parts: int = 1) -> tuple[Action, ...]:
    """What one rank does in a step.

    Args:
        schedule: one of ``SCHEDULES``.
        rank, ranks: of the pipeline.
        micro_batches: of a step; where there are several parts, a multiple of ``ranks`` or fewer than twice as many.
        parts: of the model on this rank.

    >>> [f"{action.kind[0]}{action.micro_batch}" for action in actions("1f1b", 1, 3, 4)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'f3', 'b2', 'b3']
    """
    total = micro_batches * parts
    turn = micro_batches // max(1, micro_batches // ranks)
    ahead, late = min(_ahead(schedule, rank, ranks, parts, turn, total), total), rank if schedule == "zero-bubble" else None
    found: list[Action] = []
    for moment in range(total + ahead):
        done = moment - ahead
        if moment < total:
            found.append(_action(FORWARD, moment, turn, parts))
        if done >= 0:
            found.append(_action(BACKWARD, done, turn, parts))
            if late is not None and done >= late:
                found.append(_action(WEIGHTS, done - late, turn, parts))
    left = 0 if late is None else min(late, total)
    return (*found, *(_action(WEIGHTS, index, turn, parts) for index in range(total - left, total)))


def _ahead(schedule: str, rank: int, ranks: int, parts: int, turn: int, total: int) -> int:
    """Forwards before the first that is followed by a backward."""
    if schedule == "gpipe":
        return total - 1
    return (parts - 1) * turn + (2 if schedule == "interleaved" and parts > 1 else 1) * (ranks - 1 - rank)


def _action(kind: str, index: int, turn: int, parts: int) -> Action:
    """The ``index``-th of its kind: parts take turns, forwards from the first to the last, backwards the other way."""
    part = index // turn % parts
    micro_batch = index // (turn * parts) * turn + index % turn
    return Action(kind, part if kind == FORWARD else parts - 1 - part, micro_batch)


def most_in_flight(order: tuple[Action, ...]) -> int:
    """The most parts of micro-batches whose activations are held at once; what waits for the gradients of weights is held too.

    >>> [most_in_flight(actions("1f1b", rank, 4, 8)) for rank in range(4)]
    [4, 3, 2, 1]
    """
    ends = WEIGHTS if any(action.kind == WEIGHTS for action in order) else BACKWARD
    held = most = 0
    for action in order:
        held += (action.kind == FORWARD) - (action.kind == ends)
        most = max(most, held)
    return most
