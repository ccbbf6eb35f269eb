"""Ops that cost the same: of each kind a few are measured, and what was found holds for all.

Models repeat themselves, so nearly every op of a step has others of its kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

ENOUGH = 15
"""Ops of a kind that are timed: a median of more is no better, and to ask for the time of a thread takes a while."""


@dataclass(slots=True, eq=False)
class Kind:
    """What was measured of ops that cost the same.

    Attributes:
        seconds: times of some of them.
        peak_bytes: the most bytes above the level at which each begins; ``None`` until it was seen.
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


class Kinds(dict[Hashable, Kind]):
    """The kinds of the ops of a step, by operator and a description of its arguments."""

    def __missing__(self, key: Hashable) -> Kind:
        """Make the kind that was asked for."""
        made = self[key] = Kind()
        return made


def typical_seconds(kinds: Sequence[Kind]) -> list[float]:
    """The median time of each op's kind: one that ran while the machine did something else took longer than it ever will again.

    >>> a, b = Kind([1.0, 9.0, 2.0]), Kind([5.0])
    >>> typical_seconds([a, b, a])
    [2.0, 5.0, 2.0]
    """
    medians = {kind: statistics.median(kind.seconds) for kind in set(kinds)}
    return [medians[kind] for kind in kinds]
