"""What was alive when memory ran out: from a trace and a limit here, from the allocator's own snapshot in ``lowtide.measure``.

Both give the same record, so that one display and one reading serve a CUDA step that died and a CPU step that would.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.explain._step import StepView, path_name
from lowtide.plan import simulate
from lowtide.records import Category, StepTrace
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """What one owner had when memory ran out.

    Attributes:
        owner: module path, or source line where only that is known.
        category: what the bytes were for.
        bytes, blocks: how much, in how many allocations.
    """

    owner: str
    category: Category
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The moment at which an allocation failed, or would.

    Attributes:
        limit_bytes: what there is.
        alive_bytes: what was allocated.
        asked_bytes: what the allocation asked for.
        reserved_bytes: what the allocator had taken from the device, if that is known; more than ``alive_bytes`` where
            memory is in pieces.
        where: op, module and line at which it happened, as far as they are known.
        phase: of the step, as far as it is known.
        holdings: most bytes first.
    """

    limit_bytes: int
    alive_bytes: int
    asked_bytes: int
    reserved_bytes: int | None
    where: str
    phase: str
    holdings: tuple[Holding, ...]

    @property
    def categories(self) -> tuple[tuple[Category, int], ...]:
        """Bytes by category, most first."""
        found: dict[Category, int] = {}
        for holding in self.holdings:
            found[holding.category] = found.get(holding.category, 0) + holding.bytes
        return tuple(sorted(found.items(), key=lambda entry: -entry[1]))

    @property
    def in_pieces_bytes(self) -> int:
        """Reserved by the allocator and not in use: of no use to an allocation larger than each piece."""
        return 0 if self.reserved_bytes is None else max(self.reserved_bytes - self.alive_bytes, 0)

    def summary(self) -> str:
        """The moment in a sentence."""
        parts = ", ".join(f"{format_bytes(size)} of {category.value}" for category, size in self.categories[:3])
        pieces = f"; {format_bytes(self.in_pieces_bytes)} more are reserved in pieces" if self.in_pieces_bytes else ""
        return (
            f"memory ran out {self.where or 'at an unknown place'}{f' in {self.phase}' if self.phase else ''}: "
            f"{format_bytes(self.asked_bytes)} were asked for with {format_bytes(self.alive_bytes)} of {format_bytes(self.limit_bytes)} "
            f"in use ({parts}){pieces}"
        )


def out_of_memory(trace: StepTrace, limit_bytes: int) -> OutOfMemory | None:
    """Say where a step would run out of memory, had the device only so much.

    Args:
        trace: of the step.
        limit_bytes: of the device, with what was allocated before the step.

    Returns:
        The first op that does not fit, with what is alive before it; ``None`` where the step fits.
    """
    live = simulate(trace, None).timeline.live_bytes.sum(axis=1)
    over = (live > limit_bytes).nonzero()[0]
    if not len(over):
        return None
    view, at = StepView(trace), int(over[0])
    op = trace.ops[at]
    before = [s for s in view.alive_at(at) if trace.storages[s].resident or trace.storages[s].born < at]
    alive = view.bytes_of(before)
    line = f", {op.source}" if op.source else ""
    return OutOfMemory(
        limit_bytes=limit_bytes,
        alive_bytes=alive,
        asked_bytes=int(live[at]) - alive,
        reserved_bytes=None,
        where=f"at {op.name} ({path_name(view.path_of_op(at))}{line})",
        phase=op.phase.value,
        holdings=holdings((path_name(view.owner(s)), trace.storages[s].category, trace.storages[s].bytes) for s in before),
    )


def holdings(blocks: Iterable[tuple[str, Category, int]]) -> tuple[Holding, ...]:
    """Sum blocks ``(owner, category, bytes)`` by owner and category, most first."""
    found: dict[tuple[str, Category], list[int]] = {}
    for owner, category, size in blocks:
        found.setdefault((owner, category), []).append(size)
    rows = (Holding(owner, category, sum(sizes), len(sizes)) for (owner, category), sizes in found.items())
    return tuple(sorted(rows, key=lambda h: -h.bytes))
