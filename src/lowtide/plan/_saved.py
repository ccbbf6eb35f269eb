"""What a region has in its hands for backward: tensors that autograd saved in it, and inputs that regions inside it handed to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.plan._index import Flags, Ints, TraceIndex, ints

if TYPE_CHECKING:
    from lowtide.plan._replay import Replay


@dataclass(frozen=True)
class Saved:
    """One row a tensor.

    Attributes:
        number: of the saved tensor; for an input that was handed over, of the first one for which the region inside is replayed.
        storage, position, used, released: as of a saved tensor. A handed input is wanted when the region inside is replayed.
        freed: until when it is alive without autograd.
        handed: whether it is an input of a region inside.
    """

    number: Ints
    storage: Ints
    position: Ints
    used: Ints
    released: Ints
    freed: Ints
    handed: Flags

    @staticmethod
    def by_autograd(index: TraceIndex, slots: Ints) -> Saved:
        """Some of the saved tensors of a trace."""
        storage, position, used = index.slot_storage[slots], index.position[slots], index.used[slots]
        handed = np.zeros(len(slots), dtype=np.bool_)
        return Saved(slots, storage, position, used, index.released[slots], index.slot_freed[slots], handed)

    @staticmethod
    def by_regions(index: TraceIndex, inside: Sequence[Replay], makers: Ints) -> Saved:
        """What was made by these ops and is an input of regions inside: they hand it to the hooks around them, and let go of it."""
        made = set(index.storages_born_in(makers).tolist())
        rows = [
            (replay.first_slot, storage, _taken_at(index, replay, storage), replay.before, until, int(index.freed[storage]))
            for replay in inside
            for storage, until in zip(replay.held.tolist(), replay.held_until.tolist(), strict=True)
            if storage in made
        ]
        number, storage, position, used, released, freed = (ints(column) for column in (zip(*rows, strict=True) if rows else [()] * 6))
        return Saved(number, storage, position, used, released, freed, np.ones(len(rows), dtype=np.bool_))

    def at(self, which: Flags) -> Saved:
        """Some of the rows."""
        return Saved(*(column[which] for column in self._columns))

    def with_(self, other: Saved) -> Saved:
        """These rows, then those."""
        return Saved(*map(np.concatenate, zip(self._columns, other._columns, strict=True)))

    @property
    def _columns(self) -> tuple[Any, ...]:
        return self.number, self.storage, self.position, self.used, self.released, self.freed, self.handed


def _taken_at(index: TraceIndex, replay: Replay, storage: int) -> int:
    """The op before which a region inside is given a storage for the last time: each of its modules hands on what it is given."""
    calls, last = index.trace.calls, -1
    for member in replay.calls:
        inside = range(member, int(index.call_stop[member]))
        last = next((int(index.start[c]) for c in inside if storage in (*calls[c].inputs, *calls[c].replaced)), last)
        if storage in calls[member].outputs:
            break
    return last
