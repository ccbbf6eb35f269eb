"""The ops of a step as they ran, and which of them made the backward node that another one runs for.

Autograd numbers its nodes as it makes them, and makes a node before it hands the op on to below autograd, where ops are
recorded. So the first op that is recorded after a number was given out is the one for which the node was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide._torch_private import next_sequence_number, running_sequence_number
from lowtide.records import Op, Phase
from lowtide.trace._ops import OpFacts


@dataclass(slots=True)
class _Row:
    facts: OpFacts
    phase: Phase
    call: int | None
    source: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    births: tuple[int, ...] | None
    origin: int | None


class OpTable:
    """Ops by index, in the order they ran.

    Attributes:
        clock: tells how many ops have run.
    """

    def __init__(self) -> None:
        """Start an empty table."""
        self._rows: list[_Row] = []
        self._maker_of_node: dict[int, int] = {}
        self.clock: Callable[[], int] = self._rows.__len__

    def add(
        self,
        facts: OpFacts,
        phase: Phase,
        call: int | None,
        source: str,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        births: tuple[int, ...] | None,
    ) -> None:
        """Note an op.

        Args:
            facts: of the operator.
            phase: where in the step it ran.
            call: innermost running module call.
            source: the user's line.
            reads, writes: storages it read and changed.
            births: storages that it returned; ``None`` for one that is recorded as done in place, though it was not.
        """
        origin = None
        if phase is Phase.BACKWARD:
            origin = self._running_nodes_maker()
            if origin is not None:
                call, source = self._rows[origin].call, self._rows[origin].source
        self._maker_of_node.setdefault(next_sequence_number() - 1, len(self._rows))
        self._rows.append(_Row(facts, phase, call, source, reads, writes, births, origin))

    def _running_nodes_maker(self) -> int | None:
        number = running_sequence_number()
        return None if number is None else self._maker_of_node.get(number)

    def births(self, op: int) -> tuple[int, ...]:
        """Storages that an op returned."""
        return self._rows[op].births or ()

    def records(self, seconds: Sequence[float], peaks: Sequence[int], born: Callable[[int, tuple[int, ...]], int]) -> tuple[Op, ...]:
        """The rows as records.

        Args:
            seconds: time of each op.
            peaks: the most bytes above the level at which each op began.
            born: how many bytes of some storages an op allocated.
        """
        return tuple(self._record(i, row, s, peak, born) for i, (row, s, peak) in enumerate(zip(self._rows, seconds, peaks, strict=True)))

    @staticmethod
    def _record(index: int, row: _Row, seconds: float, peak_bytes: int, born: Callable[[int, tuple[int, ...]], int]) -> Op:
        facts, born_bytes = row.facts, 0 if row.births is None else born(index, row.births)
        # Of what was allocated at most while the op ran, what it did not return.
        workspace = 0 if row.births is None else max(0, peak_bytes - born_bytes)
        where = (facts.name, row.phase, row.call, row.source, seconds, workspace, facts.random)
        return Op(*where, row.reads, row.writes, born_bytes, facts.collective, row.origin)
