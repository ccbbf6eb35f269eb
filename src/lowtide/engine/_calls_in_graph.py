"""The calls of a region in a compiler's graph, as a policy sees them: functions of torch, and the modules they are in.

What the engine learns of a region in Python says nothing about the graph, for the compiler may be the first to run it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide import _torch_compiler as torch_compiler
from lowtide.engine._families import Relation, family_for
from lowtide.engine._kept._sites import is_view, paths_of
from lowtide.engine._options import Policy
from lowtide.engine._tree import tensors_in
from lowtide.records import CallSite, Decision

if TYPE_CHECKING:
    from lowtide.engine._region import Region

NAME = "lowtide_name"
"""What a node that names the result it is given is marked with."""

_FEW = 64
_taken = [0]


def regions_in_graphs() -> int:
    """How often a compiler took a region into a graph. It replays those by itself, at no time that anybody could tell."""
    return _taken[0]


@dataclass(eq=False)
class _Row:
    """One call of a function in the graph.

    Attributes:
        function: what was called.
        modules: around it, from the region's own on, outermost first, with a text that tells two calls of one module apart.
        key: equal calls in other runs of the same graph have the same.
        ops: that ran in it, views left out.
        results: shape, dtype and bytes of its tensor results.
        own: they are its own.
        inside: it is a call of a region inside the region.
        name: given by ``lowtide.name``.
        saves: which of its ops the compiler is to save.
    """

    function: Any
    modules: tuple[tuple[str, int], ...]
    key: Any
    ops: list[Any] = field(default_factory=list)
    results: list[tuple[tuple[int, ...], Any, int]] = field(default_factory=list)
    own: bool = True
    inside: bool = False
    name: str | None = None
    saves: int = -1


def keep_nothing() -> Any:
    """What ``context_fn`` is for a region that is made inside what is compiled."""
    from lowtide.engine._marks import contexts_of

    _taken[0] += 1
    return contexts_of(None)


class InGraph:
    """What a region is to the compiler.

    Args:
        region: the region.
        root: the module that it is, if it is one.
        member: its place among the modules of the region.
        length: how many those are.

    Attributes:
        contexts: what ``context_fn`` is for it: a plain function, for the compiler takes nothing else.
        mark: regions with the same one may share a graph, see ``_families``.
        broken: why it can be in no graph, once that is known.
        plain: it was met under a function transform, where it is not replayed.
        told: that it is not in a graph.
    """

    def __init__(self, region: Region, root: Callable[[], nn.Module | None], member: int = 0, length: int = 1) -> None:
        self._region, self.root = weakref.ref(region), root  # weakly: ``contexts`` is in a cycle with this, which is to keep nothing alive
        self.member, self._is_last = member, member + 1 == length
        self.broken, self.plain = "", False
        self.told = False
        self._seen: list[list[_Row]] = []
        self._known = False
        self._family = family_for(self, region.options.policy)
        self.mark = "" if self._family is None else self._family.mark

        if torch.compiler.is_compiling():
            # It could not use a function that is made while it traces; what is made then has no policy, or is not in the graph.
            self.contexts = keep_nothing
            return

        def contexts() -> Any:
            from lowtide.engine._marks import contexts_of

            if self.region.options.policy is None:
                _taken[0] += 1
            return contexts_of(self)

        self.contexts = contexts

    @property
    def region(self) -> Region:
        """The region."""
        region = self._region()
        assert region is not None  # it is called, so it is there
        return region

    def run(self) -> Run:
        """Watch one more run."""
        return Run(self)

    def known(self, place: int, key: Any) -> _Row | None:
        """The same call in an earlier run."""
        return next((rows[place] for rows in reversed(self._seen) if place < len(rows) and rows[place].key == key), None)

    def learn(self, rows: list[_Row]) -> None:
        """A run is over: ask the policy about each of its calls."""
        _taken[0] += 1
        policy, listener = self.region.options.policy, self.region.listener
        assert policy is not None  # a region without one has ``keep_nothing`` for its contexts
        if all(self.known(place, row.key) is not None for place, row in enumerate(rows)):
            self._tell_called()
            if listener is not None and self._is_last:
                listener.replayed()  # nothing of it is left to be seen
            return
        _Sites(self, policy, rows).ask()
        self._seen = [*self._seen[1 - _FEW :], rows]
        if self._family is not None:
            self._family.settle(self, [row.saves for row in rows], lambda other, modules: other.would_save(rows, modules))

    def _tell_called(self) -> None:
        listener = self.region.listener
        if listener is not None and not self._known and self.member == 0:
            listener.called(self.region.name)
        self._known = True

    def would_save(self, rows: list[_Row], modules: Relation) -> list[int] | None:
        """What the policy decides about these calls, where this region makes them too.

        Args:
            rows: calls of another region.
            modules: by ``id`` of its modules, those of this region.
        """
        region = self._region()
        if region is None or region.options.policy is None:
            return None
        own = [
            replace(row, modules=tuple((text, id(modules[key]) if key in modules else key) for text, key in row.modules), saves=-1)
            for row in rows
        ]
        _Sites(self, region.options.policy, own).ask()
        self._tell_called()  # if it is a call of the shared graph that it runs as, nobody will hear of it
        return [row.saves for row in own]


class Run(TorchFunctionMode):
    """Watches one run of a region's graph, call by call."""

    def __init__(self, calls: InGraph) -> None:
        super().__init__()
        self._calls = calls
        self._rows: list[_Row] = []
        self._open: tuple[_Row, _Row | None] | None = None
        self._makers: dict[int, tuple[torch.Tensor, _Row]] = {}

    def saves(self, op: Any) -> bool:
        """An op runs: whether the compiler is to save what it returns."""
        if self._open is None:
            return False
        row, known = self._open
        if is_view(op):
            return False
        row.ops.append(op)
        return known is not None and known.saves == len(row.ops) - 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from lowtide.engine._marks import is_innermost

        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        meta = torch_compiler.graph_meta()
        row = _Row(
            func, _modules_in(meta), (func, _name_in(meta), tuple((_shape(t), t.dtype) for t in given)), inside=not is_innermost(self)
        )
        self._open = row, self._calls.known(len(self._rows), row.key)
        self._rows.append(row)
        try:
            result = func(*args, **kwargs)
        finally:
            self._open = None
        self._leave(row, given, result, meta)
        return result

    def _leave(self, row: _Row, given: list[torch.Tensor], result: Any, meta: dict[str, Any]) -> None:
        tensors = tensors_in(result)
        row.results = [(_shape(t), t.dtype, math.prod(_shape(t)) * t.itemsize) for t in tensors]
        row.own = bool(row.ops) and not any(t is g for t in tensors for g in given)
        row.own = row.own and not any(op._schema.is_mutable for op in row.ops)
        maker = row if row.ops else next((self._makers[id(g)][1] for g in given if id(g) in self._makers), row)
        for tensor in tensors:
            self._makers[id(tensor)] = tensor, maker
        name = meta.get("custom", {}).get(NAME)
        if name is not None:
            maker.name = name

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._makers.clear()
        if error[0] is None:
            self._calls.learn(self._rows)


class _Sites:
    """The sites of one run, in the order in which they were entered, and what is decided about them."""

    def __init__(self, calls: InGraph, policy: Policy, rows: list[_Row]) -> None:
        self._policy, self._region, self._rows = policy, calls.region.name, rows
        root = calls.root()
        self._root = root
        self._paths = {} if root is None else paths_of(root)
        self._modules = {} if root is None else {id(m): m for m in root.modules()}
        self._counts: dict[Any, int] = {}
        self._position = 0

    def ask(self) -> None:
        """Ask the policy about every site; of those in a kept one none."""
        around: list[tuple[str, int]] = []
        place = 0
        while place < len(self._rows):
            row = self._rows[place]
            inside = [entry for entry in row.modules if entry[1] in self._modules and self._modules[entry[1]] is not self._root]
            same = _common(around, inside)
            around = inside[:same]
            kept_to = None
            for entry in inside[same:]:
                around.append(entry)
                kept_to = self._ask_module(place, around)
                if kept_to is not None:
                    break
            if kept_to is None:
                self._ask_function(row, around)
                kept_to = place + 1
            place = kept_to

    def _ask_module(self, place: int, around: list[tuple[str, int]]) -> int | None:
        """Where the module's call ends, if its results are kept."""
        module = self._modules[around[-1][1]]
        end = place
        while end < len(self._rows) and around[-1] in self._rows[end].modules:
            end += 1
        inside = self._rows[place:end]
        last = inside[-1]
        ops = [op for row in inside for op in row.ops]
        index = self._count(module)
        if not last.own or not ops or self._decide(module, "module", ops, around, index, last) is not Decision.KEEP:
            return None
        last.saves = len(last.ops) - 1
        return end

    def _ask_function(self, row: _Row, around: list[tuple[str, int]]) -> None:
        index = self._count(row.function)
        if row.own and not row.inside and self._decide(row.function, "function", row.ops, around, index, row) is Decision.KEEP:
            row.saves = len(row.ops) - 1

    def _decide(self, function: Any, level: Any, ops: list[Any], around: list[tuple[str, int]], index: int, result: _Row) -> Decision:
        shapes, dtypes, sizes = zip(*result.results, strict=True) if result.results else ((), (), ())
        modules = [self._modules[key] for _, key in around]
        path = self._paths[id(modules[-1])] if modules else "" if self._root is None else self._paths[id(self._root)]
        types = tuple(type(module) for module in ([] if self._root is None else [self._root]) + modules)
        random = any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)
        site = CallSite(
            function, level, tuple(ops), path, types, index, self._position, result.name, shapes, dtypes, sum(sizes), random,
            self._region,
        )  # fmt: skip
        self._position += 1
        return self._policy.decide(site)

    def _count(self, function: Any) -> int:
        key = id(function) if isinstance(function, nn.Module) else function
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key] - 1


def _common(one: list[tuple[str, int]], other: list[tuple[str, int]]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _modules_in(meta: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple((key, int(key.partition("@")[0])) for key in meta.get("nn_module_stack", {}))


def _name_in(meta: dict[str, Any]) -> str:
    stack = meta.get("source_fn_stack") or [("", None)]
    return str(stack[-1][0])


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where sizes are symbols, those of the step that is traced: to ask for more would have the compiler make it a condition."""
    return tuple(map(torch_compiler.size_hint, tensor.shape))
