"""What a policy decided about the calls of a region, and how to find those that are kept."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.engine._clock import clock
from lowtide.errors import InvalidInputError
from lowtide.records import CallSite, Decision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lowtide.engine._call import Call
    from lowtide.engine._options import Policy

_MOST_WAYS = 16
_MOST_POLICIES = 16
_MOST_KINDS = 64
_NO_KINDS: dict[Any, Any] = {}
_MOST_CHOICES = 64
_FEW_CALLS = 2
_FLAGS = frozenset({bool, str, type(None)})

Key = tuple[Any, int]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which calls are kept. A run and its replays go by one and the same.

    Attributes:
        since: the time on the ``clock`` from which on it holds.
        indices: by function, or ``id`` of a module, which of its calls are kept.
        modules: those modules, by ``id``.
        closed: modules, by ``id``, in which no function is called that is ever kept: functions are not looked at in there.
        ways: how often audited calls called each function and module.
    """

    since: int = 0
    indices: dict[Any, frozenset[int]] = field(default_factory=dict)
    modules: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    closed: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    ways: tuple[dict[Any, int], ...] = ()

    @property
    def functions(self) -> bool:
        """Whether calls of functions are among them."""
        return len(self.modules) < len(self.indices)


NOTHING = Choice()


@dataclass(slots=True)
class Learned:
    """What is known of one kind of call of a piece of code under one policy.

    Attributes:
        policy: who decided.
        choices: what was chosen so far, the last one last.
        copied: calls whose results are written to later: they are kept as copies.
        ways: how often audited calls called each function and module.
        callers: modules, by ``id``, with the functions that are called in them, and how often that was at most.
        decided: by identity, each site with the decision about it. Modules are referred to weakly.
    """

    policy: Policy
    choices: list[Choice] = field(default_factory=list)
    copied: set[Key] = field(default_factory=set)
    ways: list[dict[Any, int]] = field(default_factory=list)
    callers: dict[int, tuple[weakref.ref[nn.Module], dict[Any, int]]] = field(default_factory=dict)
    decided: dict[Key, tuple[CallSite, weakref.ref[nn.Module] | None, Decision]] = field(default_factory=dict)

    def ask(self, site: CallSite) -> Decision:
        """The decision about a site; the policy is asked once.

        Raises:
            InvalidInputError: what it answered is no decision that can be carried out.
        """
        key = self.key_of(site.function, site.index)
        known = self.decided.get(key)
        if known is not None and (known[1] is None or known[1]() is site.function):
            return known[2]
        answer: Any = self.policy.decide(site)
        if answer is not Decision.KEEP and answer is not Decision.RECOMPUTE:
            raise InvalidInputError(
                f"a policy must decide Decision.KEEP or Decision.RECOMPUTE, but for {site.function_name} in {site.module or site.region!r} "
                f"{self.policy!r} returned {answer!r}: return Decision.RECOMPUTE for what need not be kept"
            )
        ref = weakref.ref(site.function) if site.level == "module" else None
        self.decided[key] = (site if ref is None else replace(site, function=None)), ref, answer
        return answer

    @staticmethod
    def key_of(function: Any, index: int) -> Key:
        """Which call this is: its function, or the ``id`` of its module, and how often that was called before."""
        return (id(function) if isinstance(function, nn.Module) else function), index

    def choice_at(self, time: int) -> Choice:
        """What had been chosen by a time on the ``clock``."""
        return next((choice for choice in reversed(self.choices) if choice.since <= time), NOTHING)

    def keep(self, calls: list[tuple[Any, int]]) -> None:
        """From now on these calls, of a function or a module, are kept as well."""
        last = self.choices[-1] if self.choices else NOTHING
        indices, modules = dict(last.indices), dict(last.modules)
        for function, index in calls:
            key = self.key_of(function, index)[0]
            if isinstance(function, nn.Module):
                modules[key] = weakref.ref(function)
            indices[key] = indices.get(key, frozenset()) | {index}
        ways = tuple({function: way.get(function, 0) for function in indices} for way in self.ways)
        if not self.choices or indices != last.indices or ways != last.ways:
            clock.now += 1
            self.choices = [*self.choices[1 - _MOST_CHOICES :], Choice(clock.now, indices, modules, self._closed(indices), ways)]

    def _closed(self, indices: dict[Any, frozenset[int]]) -> dict[int, weakref.ref[nn.Module]]:
        """Modules that it pays to close: for a single call of a function written in C it does not."""
        if not any(key not in self.callers for key in indices):
            return {}
        return {
            key: ref
            for key, (ref, functions) in self.callers.items()
            if not indices.keys() & functions.keys()
            and (sum(functions.values()) > _FEW_CALLS or any(isinstance(function, FunctionType) for function in functions))
        }

    def went(self, calls: dict[Any, int]) -> None:
        """An audited call called each function and module so often."""
        if calls not in self.ways:
            self.ways = [*self.ways[1 - _MOST_WAYS :], calls]

    def sites(self) -> Iterator[CallSite]:
        """The sites that are kept."""
        for site, ref, decision in self.decided.values():
            function = site.function if ref is None else ref()
            key = None if function is None else self.key_of(function, site.index)
            if decision is Decision.KEEP and key is not None and self.choices and key[1] in self.choices[-1].indices.get(key[0], ()):
                yield replace(site, function=function)


Table = dict[int, dict[Any, Learned]]
"""By ``id`` of the policy, which what was learned refers to; then by kind of call."""


def table_of(call: Call) -> Table:
    """Where to look for what was learned of a call: with its modules, so that it goes with them, or with its code."""
    return call.watches[0][0].kept if call.watches else call.profile.kept


def learned_of(call: Call, policy: Policy) -> Learned | None:
    """What was learned of calls of this kind under a policy; ``None`` if no such call was watched.

    Where kinds never repeat there is nothing to learn, and nothing is kept.
    """
    kinds = table_of(call).get(id(policy), _NO_KINDS)
    return kinds.get(_kind_of(call)) or (Learned(policy) if len(kinds) >= _MOST_KINDS else None)


def learn_of(call: Call, policy: Policy) -> Learned:
    """The same, made if there is none."""
    table = table_of(call)
    if id(policy) not in table and len(table) >= _MOST_POLICIES:
        del table[next(iter(table))]
    return table.setdefault(id(policy), {}).setdefault(_kind_of(call), Learned(policy))


def _kind_of(call: Call) -> Any:
    """Calls with other flags among their arguments, or modules in other training modes, do other things."""
    flags = tuple([value for value in (*call.args, *call.kwargs.values()) if type(value) in _FLAGS])
    modes = tuple([flag for _, taken in call.watches for flag in taken[2]])
    return id(call.profile), flags, modes
