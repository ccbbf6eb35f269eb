"""Regions that may share what the compiler made of one of them.

Blocks that are compiled one by one run the same code, so that the compiler would use the graph of the first for all, with what the policy
decided about the first. A policy may decide otherwise about another: it may go by the path of a module, and a plan keeps other calls in
each. So each region has a mark that the compiler looks at before it takes a graph. Regions have one mark in common until the calls of one
of them are known: then the policies of the others are asked about the same calls, and those that decide otherwise get another.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lowtide.engine._calls_in_graph import InGraph

_marks = itertools.count(1)
_open: weakref.WeakValueDictionary[Hashable, Family] = weakref.WeakValueDictionary()


class Family:
    """Regions whose policies may decide alike. None joins any more once the calls of one are known.

    Attributes:
        mark: what they have in common at first.
    """

    def __init__(self) -> None:
        self.mark = _new_mark()
        self._members: weakref.WeakSet[InGraph] = weakref.WeakSet()

    def settle(self, first: InGraph, decided: list[int], decide: Callable[[InGraph, Relation], list[int] | None]) -> None:
        """The calls of one are known, and what was decided about them: tell apart from it those that decide otherwise.

        Args:
            first: the one.
            decided: about each call.
            decide: asks the policy of another about the same calls; ``None`` where it does not have them.
        """
        for key in [key for key, family in _open.items() if family is self]:
            del _open[key]
        marks = {tuple(decided): first.mark}
        for other in [other for other in self._members if other is not first and other.mark == first.mark]:
            modules = relation(first.root(), other.root())
            answer = None if modules is None else decide(other, modules)
            other.mark = _new_mark() if answer is None else marks.setdefault(tuple(answer), _new_mark())


Relation = dict[int, nn.Module]
"""By ``id`` of a module in one region, the module at its place in another."""


def family_for(region: InGraph, policy: Any) -> Family | None:
    """The one that a region is to be in; none without a policy, for then there is nothing to decide."""
    if policy is None:
        return None
    key = getattr(policy, "alike", policy)
    try:
        family = _open.get(key)
    except TypeError:
        key, family = id(policy), None
    if family is None:
        family = _open[key] = Family()
    family._members.add(region)
    return family


def relation(one: nn.Module | None, other: nn.Module | None) -> Relation | None:
    """Which module of one is which of the other; ``None`` where they are not made of the same."""
    if one is None or other is None:
        return {} if one is other else None
    found: Relation = {}
    theirs = dict(other.named_modules(remove_duplicate=False))
    for path, module in one.named_modules(remove_duplicate=False):
        counterpart = theirs.get(path)
        if type(counterpart) is not type(module):
            return None
        assert counterpart is not None
        found[id(module)] = counterpart
    return found


def _new_mark() -> str:
    # A text: of a number the compiler would make a variable once it had seen two.
    return f"#{next(_marks)}"
