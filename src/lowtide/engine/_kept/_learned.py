"""What a policy decided about the calls of a region, and how to find those that are kept."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.autograd import Function

from lowtide.engine._clock import clock
from lowtide.engine._kept._looks import Trail, looks_of, met_while_looking
from lowtide.engine._kept._modules import StandIn, stand_in_for
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
_IN_PYTHON = 3
"""So many times as long as at a function in C it takes to look at one in Python, which hands itself over anew."""
_FLAGS = frozenset({bool, str, type(None)})

Key = tuple[Any, int]


class Traits(NamedTuple):
    """What is known of a function by what it is.

    Attributes:
        writes_statistics: to running statistics among its arguments; a replay is given copies of those, which nobody sees afterwards.
        fills_later: a collective: its result is filled, and has another version, at a time that differs from process to process.
        never_draws: it draws from no generator.
    """

    writes_statistics: bool
    fills_later: bool
    never_draws: bool


COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"})
_NEVER_DRAW = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "group_norm"}
    | {"batch_norm", "gelu", "silu", "relu", "tanh", "sigmoid", "softmax", "log_softmax", "cross_entropy", "topk", "add", "mul", "cat"}
)


def is_applied(function: Any) -> bool:
    """Whether it is an autograd Function."""
    return isinstance(function, type) and issubclass(function, Function)


def traits_of(function: Any) -> Traits:
    """Of a function, or of a module by its ``id``."""
    if is_applied(function):
        return Traits(False, False, False)
    name = getattr(function, "__name__", "")
    space = getattr(function, "namespace", None) or str(getattr(function, "_qualified_op_name", "")).partition("::")[0]
    return Traits("batch_norm" in name, space in COLLECTIVES, name in _NEVER_DRAW)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which calls are kept. A run and its replays go by one and the same.

    Attributes:
        since: the time on the ``clock`` from which on it holds.
        indices: by function, or ``id`` of a module, which of its calls are kept.
        modules: those modules, by ``id``.
        marks: ``id`` of the modules that a run marks its way by: it passes a mark where it enters one, and one where it leaves it.
        looks: after how many marks calls of functions are looked at, up to the next mark; ``None``: always.
        closed: ``id`` of modules in which no function is called that is ever kept: functions are not looked at in there.
        linears: ``id`` of those ``nn.Linear`` whose one call of a function is kept: to stand in for it costs less than to look at that.
        stand_ins: of all these modules.
        applied: autograd Functions whose results are kept.
        ways: how often audited calls called each function and module.
        traits: of each function, or module.
    """

    since: int = 0
    indices: dict[Any, frozenset[int]] = field(default_factory=dict)
    modules: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    marks: frozenset[int] = frozenset()
    looks: frozenset[int] | None = frozenset()
    closed: frozenset[int] = frozenset()
    linears: frozenset[int] = frozenset()
    stand_ins: tuple[StandIn, ...] = ()
    applied: tuple[type[Function], ...] = ()
    ways: tuple[dict[Any, int], ...] = ()
    traits: dict[Any, Traits] = field(default_factory=dict)


NOTHING = Choice()


@dataclass(slots=True)
class Learned:
    """What is known of one kind of call of a piece of code under one policy.

    Attributes:
        policy: who decided.
        choices: what was chosen so far, the last one last.
        copied: calls whose results are written to later: they are kept as copies.
        ways: how often audited calls called each function and module.
        trails: what they called: each function, and the ``id`` of each module, with ``~id`` where it was left.
        asks: such calls ask whether they are replayed, and may do this or that then.
        everywhere: calls of functions have to be looked at all along, for one that should have been found was not.
        callers: modules, by ``id``, with the functions that are called in them, and how often that was at most.
        decided: by identity, each site with the decision about it. Modules are referred to weakly.
        linears: every ``nn.Linear``, by ``id``, in which a call of ``F.linear`` is kept.
        free: of each tensor that autograd saved in the call before, whether it is, or shows, a result that is kept anyway.
    """

    policy: Policy
    choices: list[Choice] = field(default_factory=list)
    copied: set[Key] = field(default_factory=set)
    ways: list[dict[Any, int]] = field(default_factory=list)
    trails: list[Trail] = field(default_factory=list)
    asks: bool = False
    everywhere: bool = False
    callers: dict[int, tuple[weakref.ref[nn.Module], dict[Any, int]]] = field(default_factory=dict)
    decided: dict[Key, tuple[CallSite, weakref.ref[nn.Module] | None, Decision]] = field(default_factory=dict)
    linears: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    free: list[bool] | None = None

    @property
    def latest(self) -> Choice:
        """What was chosen last."""
        return self.choices[-1] if self.choices else NOTHING

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
        last = self.latest
        indices, modules = dict(last.indices), dict(last.modules)
        for function, index in calls:
            key = self.key_of(function, index)[0]
            if isinstance(function, nn.Module):
                modules[key] = weakref.ref(function)
            indices[key] = indices.get(key, frozenset()) | {index}
        self._choose(indices, modules)

    def look_everywhere(self) -> None:
        """A run called other functions than any that was watched, or some were not seen that were called where none was looked for."""
        if self.latest.looks is not None and not self.everywhere:
            self.everywhere = True
            self._choose(self.latest.indices, self.latest.modules)

    def _choose(self, indices: dict[Any, frozenset[int]], modules: dict[int, weakref.ref[nn.Module]]) -> None:
        last = self.latest
        ways = tuple({function: way.get(function, 0) for function in indices} for way in self.ways)
        linears = {key: ref for key, ref in self.linears.items() if key not in modules}
        marks = frozenset({*modules, *linears})
        closed = self._closed(indices)
        looks = None if self.everywhere else looks_of(self.trails, indices, marks, linears)
        if looks is not None:
            closed = {key: closed[key] for key in met_while_looking(self.trails, looks, marks) & closed.keys()}
        if self.choices and (indices, ways, looks, frozenset(closed)) == (last.indices, last.ways, last.looks, last.closed):
            return
        clock.now += 1
        refs = modules | closed | linears
        found = {key: module for key, module in [(key, ref()) for key, ref in refs.items()] if module is not None}
        choice = Choice(
            clock.now,
            indices,
            modules,
            marks & found.keys(),
            looks,
            frozenset(closed) & found.keys(),
            frozenset(linears) & found.keys(),
            tuple(map(stand_in_for, found.values())),
            tuple(filter(is_applied, indices)),
            ways,
            {key: traits_of(key) for key in indices},
        )
        self.choices = [*self.choices[1 - _MOST_CHOICES :], choice]
        self.free = None

    def _closed(self, indices: dict[Any, frozenset[int]]) -> dict[int, weakref.ref[nn.Module]]:
        """Modules that it pays to close: to stand in for one costs as much as to look at a few calls of functions."""
        if not any(key not in self.callers for key in indices):
            return {}
        return {
            key: ref
            for key, (ref, functions) in self.callers.items()
            if not indices.keys() & functions.keys()
            and sum(count * (_IN_PYTHON if isinstance(function, FunctionType) else 1) for function, count in functions.items()) > _FEW_CALLS
        }

    def went(self, calls: dict[Any, int], trail: Trail) -> None:
        """An audited call called each function and module so often, in this order."""
        if calls not in self.ways:
            self.ways = [*self.ways[1 - _MOST_WAYS :], calls]
        if trail not in self.trails:
            self.trails = [*self.trails[1 - _MOST_WAYS :], trail]

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
