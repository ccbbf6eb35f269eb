"""The ops of a step as they ran, and which of them made the backward node that another one runs for.

Autograd numbers its nodes as it makes them, and makes a node before it hands the op on to below autograd, where ops are
recorded. So the first op that is recorded after a number was given out is the one for which the node was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide._torch_private import next_sequence_number
from lowtide._torch_tracing import running_sequence_number
from lowtide.records import Op, Phase
from lowtide.trace._acceleration import records_of
from lowtide.trace._ops import OpFacts

_BACKWARD = Phase.BACKWARD


class OpTable:
    """Ops by index, in the order they ran.

    Attributes:
        clock: tells how many ops have run.
        rows: one for each op.
        maker_of_node: by the number of a backward node, the op for which it was made.
    """

    def __init__(self) -> None:
        """Start an empty table."""
        # Facts, phase, call, source, reads, writes, births and origin of each: a tuple is made in a quarter of the time of an object.
        self.rows: list[tuple[OpFacts, Phase, int | None, str, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, int | None]] = []
        self.maker_of_node: dict[int | None, int] = {}
        self._last_number = -1
        self.clock: Callable[[], int] = self.rows.__len__

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
        rows, origin = self.rows, None
        if phase is _BACKWARD:
            origin = self.maker_of_node.get(running_sequence_number())
            if origin is not None:
                _, _, call, source, *_ = rows[origin]
        number = next_sequence_number()
        if number != self._last_number:
            self._last_number = number
            self.maker_of_node.setdefault(number - 1, len(rows))
        rows.append((facts, phase, call, source, reads, writes, births, origin))

    def births(self, op: int) -> tuple[int, ...]:
        """Storages that an op returned."""
        *_, births, _ = self.rows[op]
        return births or ()

    def records(self, seconds: Sequence[float], peaks: Sequence[int], born: Callable[[int, tuple[int, ...]], int]) -> tuple[Op, ...]:
        """The rows as records.

        Args:
            seconds: time of each op.
            peaks: the most bytes above the level at which each op began.
            born: how many bytes of some storages an op allocated.
        """
        facts, phases, calls, sources, reads, writes, births, origins = zip(*self.rows, strict=True) if self.rows else ((),) * 8
        born_bytes = [0 if made is None else born(op, made) for op, made in enumerate(births)]
        # Of what was allocated at most while an op ran, what it did not return.
        workspace = [0 if made is None or peak < size else peak - size for made, peak, size in zip(births, peaks, born_bytes, strict=True)]
        names, random, collective = [f.name for f in facts], [f.random for f in facts], [f.collective for f in facts]
        columns = (names, phases, calls, sources, seconds, workspace, random, reads, writes, born_bytes, collective, origins)
        return records_of(Op, *columns)
