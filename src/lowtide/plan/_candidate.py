"""One region with what it keeps, as solvers weigh it: what it drops, holds and takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.plan._index import NEVER, Ints, ints
from lowtide.plan._replay import Replay, slots_of
from lowtide.plan._solution import KeptCall, PlannedRegion


@dataclass(frozen=True)
class Candidate:
    """A region with all its occurrences.

    Attributes:
        paths: of its modules.
        kept: calls whose results it keeps.
        replays: one for each occurrence; with regions inside, those of each of them as well, in the order in which they run.
        inside: regions in it that are replayed on their own.
        first_saved: of the tensors saved in it, how many it drops; ``None`` for all.
    """

    paths: tuple[str, ...]
    kept: tuple[KeptCall, ...]
    replays: tuple[Replay, ...]
    inside: tuple[PlannedRegion, ...] = ()
    first_saved: int | None = None

    @property
    def region(self) -> PlannedRegion:
        """As a plan has it."""
        return PlannedRegion(self.paths, kept=self.kept, inside=self.inside, first_saved=self.first_saved)

    @cached_property
    def seconds(self) -> float:
        """Time that it adds to the step."""
        return sum((r.seconds + r.gather_s + r.overhead_s for r in self.replays), start=0.0)

    @cached_property
    def calls(self) -> frozenset[int]:
        """The calls of its members and inside them that call no other module: what it has in common with regions that overlap it."""
        inside = (c for r in self.replays for call in r.calls for c in range(call, int(r.index.call_stop[call])))
        index = self.replays[0].index
        return frozenset(call for call in inside if index.is_leaf(call) and index.is_offered[call])

    @cached_property
    def dropped(self) -> frozenset[int]:
        """The saved tensors that it drops."""
        return frozenset(int(slot) for r in self.replays for slot in r.dropped)

    @cached_property
    def held(self) -> frozenset[tuple[int, int]]:
        """Storage and end of all that it holds."""
        return frozenset(hold for r in self.replays for hold in zip(r.held.tolist(), r.held_until.tolist(), strict=True))

    @cached_property
    def fetched(self) -> frozenset[int]:
        """Storages of parameters that its replays fetch."""
        return frozenset(storage for r in self.replays for gather in r.gathers for storage in gather.storages)

    @cached_property
    def freed_bytes(self) -> int:
        """Bytes of what it drops and does not save elsewhere, less those of results that nobody would have saved had it not kept them."""
        index = self.replays[0].index
        dropped = ints({int(index.slot_storage[slot]) for slot in self.dropped})
        if self.first_saved is not None:
            dropped = np.setdiff1d(dropped, np.concatenate([index.slot_storage[_after(r, self.first_saved)] for r in self.replays]))
        results = np.unique(np.concatenate([r.results for r in self.replays]))
        return int(index.bytes[dropped].sum() - index.bytes[np.setdiff1d(results, index.slot_storage)].sum())

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes that one of its replays adds."""
        return max((r.peak_bytes for r in self.replays), default=0)

    @cached_property
    def ops(self) -> tuple[tuple[int, ...], ...]:
        """The ops that run again, by replay."""
        return tuple(tuple(r.ops.tolist()) for r in self.replays if r.before != NEVER)


def _after(replay: Replay, first_saved: int) -> Ints:
    """The saved tensors that it keeps, being after so many."""
    return slots_of(replay.index, replay.calls)[first_saved:]
