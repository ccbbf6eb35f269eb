"""Which candidates may not be in one plan: regions that share a call, and modules inside one another by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from lowtide.plan._candidate import Candidate
from lowtide.plan._solution import ancestors

Key = int | str


class Conflicts:
    """The conflicts among some candidates.

    Everything that two regions may not both have is a key: a call that calls no other module, or the path of a module that has
    none inside. Two candidates exclude each other when they have a key in common.

    Attributes:
        keys: of each candidate.
    """

    def __init__(self, found: Sequence[Candidate]) -> None:
        inside = _leaves_inside(found)
        # A module inside another by name may be called outside of it; a plan still names one of them only.
        self.keys: tuple[frozenset[Key], ...] = tuple(
            frozenset({*c.calls, *(leaf for path in c.paths for leaf in inside[path])}) for c in found
        )

    def all_exclude(self, one: int, others: Collection[int]) -> bool:
        """Whether a candidate excludes each of the others."""
        mine = self.keys[one]
        return one not in others and not any(map(mine.isdisjoint, (self.keys[other] for other in others)))

    @cached_property
    def around(self) -> dict[Key, set[int]]:
        """Key to the candidates that have it: one of them at most is chosen."""
        found: dict[Key, set[int]] = {}
        for i, keys in enumerate(self.keys):
            for key in keys:
                found.setdefault(key, set()).add(i)
        return found

    @cached_property
    def cliques(self) -> list[list[int]]:
        """Groups of candidates of which a plan may have one at most; every conflict is in one, and none is inside another."""
        groups = sorted({frozenset(g) for g in self.around.values()}, key=lambda g: (-len(g), sorted(g)))
        kept: list[frozenset[int]] = []
        larger: dict[int, list[frozenset[int]]] = {}
        for group in groups:
            # A group around it has every one of its members, so also the first.
            if not any(group <= other for other in larger.get(min(group), ())):
                kept.append(group)
                for member in group:
                    larger.setdefault(member, []).append(group)
        return [sorted(g) for g in kept]


def _leaves_inside(found: Sequence[Candidate]) -> dict[str, list[str]]:
    """For each path of a candidate the paths inside it, itself included, that have no other path of a candidate inside."""
    paths = {path for candidate in found for path in candidate.paths}
    outer = {a for path in paths for a in ancestors(path)}
    inside: dict[str, list[str]] = {}
    for leaf in paths - outer:
        for path in (leaf, *ancestors(leaf)):
            inside.setdefault(path, []).append(leaf)
    return inside
