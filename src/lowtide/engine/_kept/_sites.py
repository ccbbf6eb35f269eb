"""The calls of an audited run that could be kept, for a policy to be asked about when the run is over.

Left out are calls that have no results of their own: those that only make views, that write to an argument, or that
return one, and those whose saved tensors go to other hooks than the region's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lowtide import _torch_compiler as torch_compiler
from lowtide import _torch_private as private
from lowtide.engine._kept._applied import all_functions, put_applied, take_out_applied
from lowtide.engine._kept._aside import finder_left_aside
from lowtide.engine._kept._between import Between
from lowtide.engine._kept._learned import Learned, is_applied, learn_of, traits_of
from lowtide.engine._kept._origins import tensors_of
from lowtide.engine._replay import tell_once
from lowtide.engine._thread import state
from lowtide.engine._tree import tensors_in
from lowtide.errors import InvalidInputError
from lowtide.records import CallSite, Decision

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._options import Policy

_NO_KERNEL = frozenset({"aten::_unsafe_view", "aten::detach", "aten::alias", "aten::lift_fresh"})


@dataclass(slots=True, eq=False)
class _Row:
    """One call of the run, see ``CallSite``.

    Attributes:
        around: the innermost module call it is in.
        outer: the innermost call of a module or an autograd Function that it is in.
        given: memory of its arguments.
        results: of its tensor results, shape, dtype and bytes.
        own: whether its results are its own; not known before it is over.
        draws: an op in it draws from a generator. Not called ``random``: audits take code that names that for random code.
        written: something writes to a result later.
        in_place: it writes to an argument, and returns that.
        watched: what autograd saves in it comes to the region.
        from_device: an argument is on an accelerator.
        to_host: and its results are not.
    """

    function: Any
    level: Literal["function", "module"]
    path: str
    types: tuple[type, ...]
    index: int
    around: _Row | None
    outer: _Row | None
    given: set[int]
    watched: bool
    from_device: bool
    to_host: bool = False
    ops: list[Any] = field(default_factory=list)
    results: list[tuple[tuple[int, ...], Any, int]] = field(default_factory=list)
    own: bool = True
    over: bool = False
    draws: bool = False
    written: bool = False
    in_place: bool = False
    names: list[str] = field(default_factory=list)
    kept: bool = False

    def site(self, position: int, region: str) -> CallSite:
        """As a policy sees it."""
        shapes, dtypes, sizes = zip(*self.results, strict=True) if self.results else ((), (), ())
        ops, types = tuple(self.ops), self.types
        return CallSite(
            self.function,
            self.level,
            ops,
            self.path,
            types,
            self.index,
            position,
            self.names[0] if self.names else None,
            shapes,
            dtypes,
            sum(sizes),
            self.draws,
            region,
            self.to_host,
            tuple(self.names[1:]),
        )


class Sites(Between):
    """Watches one run of a region, op by op, and call by call."""

    def __init__(self, call: Call, root: nn.Module | None, region: str) -> None:
        super().__init__()
        self._call, self._region = call, region
        self._rows: list[_Row] = []
        self._open: list[_Row] = []
        self._compiled: list[FrameType] = []
        self._unseen = ""
        self._trail: list[Any] = []
        self._calls: dict[Any, int] = {}
        self._makers: dict[int, list[_Row]] = {}
        self._root, self._pack = root, None  # type: tuple[nn.Module | None, Any]
        self._paths = {} if root is None else paths_of(root)
        self._types = () if root is None else (type(root),)
        self._path = "" if root is None else self._paths[id(root)]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The run goes on in here, under the hooks of the region."""
        hooks = private.top_hooks()
        self._pack = None if hooks is None else hooks[0]
        state.asked = False
        with ExitStack() as stack:
            stack.enter_context(self)
            for handle in (
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            ):
                stack.callback(handle.remove)
            state.recorders.append(self)
            stack.callback(state.recorders.pop)
            functions = all_functions()
            put_applied(functions)
            stack.callback(take_out_applied, functions)
            stack.callback(self._let_go)
            yield

    def _let_go(self) -> None:
        """Of the hook, which leads back here."""
        self._pack = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._compiled:
            return func(*args, **kwargs)
        self._trail.append(func)
        row = self._enter(func, "function", tensors_of((*args, *kwargs.values())))
        result = _FAILED
        try:
            result = func(*args, **kwargs)
            return result
        finally:
            self._leave(row, result)

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if self._is_here():
            if self._root is None:
                self._root, self._paths = module, paths_of(module)
            self._enter(module, "module", _tensors_in(args) or [])
            self._trail.append(id(module))

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._is_here() and any(row.function is module for row in self._open):
            while self._open[-1].function is not module:
                self._leave(self._open[-1], _FAILED)
            self._leave(self._open[-1], result)

    def see_compiled(self, frame: FrameType, event: str) -> None:
        """Compiled code is entered, or left. Nothing of it can be found again where it runs compiled."""
        if event == "call":
            self._unseen = self._unseen or _name_of(frame.f_locals.get("fn"))
            torch_compiler.at_each_entry(frame, finder_left_aside)
            self._compiled.append(frame)
        elif frame in self._compiled:
            self._compiled.remove(frame)

    def see_apply(self, function: type[Function], given: list[torch.Tensor]) -> Callable[[Any], None]:
        """An autograd Function is called; what is returned is to be told of its result. In a call of a function, as of a custom op, it is a
        part of that."""
        if self._compiled:
            return _nothing
        if self._open and self._open[-1].level == "function" and not is_applied(self._open[-1].function):
            self._calls[function] = self._calls.get(function, 0) + 1
            return _nothing
        row = self._enter(function, "function", given)
        return lambda result: self._leave(row, _FAILED if result is None else result)

    def _is_here(self) -> bool:
        return bool(state.recorders) and state.recorders[-1] is self and not self._compiled

    def _enter(self, function: Any, level: Literal["function", "module"], given: list[torch.Tensor]) -> _Row:
        key = Learned.key_of(function, 0)[0]
        index = self._calls.get(key, 0)
        self._calls[key] = index + 1
        around = next((row for row in reversed(self._open) if row.level == "module"), None)
        path, types = (self._path, self._types) if around is None else (around.path, around.types)
        if level == "module" and function is not self._root:
            path, types = self._paths.get(id(function), path), (*types, type(function))
        hooks = private.top_hooks()
        watched = hooks is not None and hooks[0] is self._pack
        outer = next((row for row in reversed(self._open) if row is around or is_applied(row.function)), None)
        row = _Row(
            function, level, path, types, index, around, outer, set(map(private.storage_key, given)), watched, any(map(_on_device, given))
        )
        self._rows.append(row)
        self._open.append(row)
        return row

    def _leave(self, row: _Row, result: Any) -> None:
        if row not in self._open:
            return
        self._open.remove(row)
        if row.level == "module":
            self._trail.append(~id(row.function))
        row.over = True
        tensors = None if result is _FAILED else _tensors_in(result)
        if tensors is None:
            row.own = False
            return
        row.to_host = row.from_device and bool(tensors) and not any(map(_on_device, tensors))
        row.results = [(tuple(tensor.shape), tensor.dtype, private.bytes_of(tensor)) for tensor in tensors]
        for key in map(private.storage_key, tensors):
            row.own = row.own and key not in row.given
            self._makers.setdefault(key, []).append(row)

    def see_op(self, func: Any, written: list[torch.Tensor]) -> None:
        """An op is about to run, and writes to these."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        for row in self._open:
            row.draws = row.draws or random
            if not is_view(func):
                row.ops.append(func)
        for key in map(private.storage_key, written):
            for row in self._open:
                if key in row.given and not traits_of(row.function).writes_statistics:
                    row.own, row.in_place = False, True
            for row in self._makers.get(key, ()):
                row.written = True

    def see_result(self, new: set[int]) -> None:
        """It has run: memory that is new was made by no call yet, whatever was there before."""
        for key in new:
            self._makers.pop(key, None)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Name what made a tensor."""
        makers = self._makers.get(private.storage_key(tensor))
        if makers and name not in makers[0].names:
            makers[0].names.append(name)

    def learn(self, policy: Policy) -> None:
        """Ask the policy about every site, of those in a kept one none.

        Raises:
            InvalidInputError: it returned something that is no decision.
        """
        learned = learn_of(self._call, policy)
        learned.asks = learned.asks or state.asked
        learned.went(self._calls, tuple(self._trail))
        self._note_callers(learned)
        position = 0
        refused = getattr(policy, "refused", None)
        for row in self._rows:
            if row.in_place and refused is not None:
                refused(row.site(position, self._region))
            if not row.over or not row.own or not row.ops or not row.watched or row.function is self._root:
                continue
            if self._in_kept(row.outer) or (row.outer is not None and is_applied(row.outer.function) and row.outer.ops == row.ops):
                continue  # the outer call is kept, or is this one with a backward of its own: it was asked about
            if learned.ask(row.site(position, self._region)) is Decision.KEEP:
                self._keep(learned, row)
            position += 1
        learned.keep([(row.function, row.index) for row in self._rows if row.kept])
        if self._unseen:
            self._tell_unseen(policy)

    def _tell_unseen(self, policy: Policy) -> None:
        not_seen = getattr(policy, "not_seen", None)
        if not_seen is not None:
            not_seen(self._unseen)
        tell_once(
            self._call.profile,
            f"the policy of region {self._region!r} cannot see what torch.compile compiles inside it ({self._unseen}): all of that is "
            "replayed. To have it decide there too, compile around the region: torch.compile(lowtide.checkpoint(function, policy=...)), or "
            "apply the policy to the model and compile that",
        )

    def _note_callers(self, learned: Learned) -> None:
        found: dict[int, tuple[nn.Module, dict[Any, int]]] = {}
        for row in self._rows:
            around = row.around if row.level == "function" else None
            while around is not None:
                _, functions = found.setdefault(id(around.function), (around.function, {}))
                functions[row.function] = functions.get(row.function, 0) + 1
                around = around.around
        found.pop(id(self._root), None)
        for key, (module, functions) in found.items():
            learned.callers[key] = weakref.ref(module), {**learned.callers.get(key, (None, {}))[1], **functions}

    @staticmethod
    def _in_kept(row: _Row | None) -> bool:
        while row is not None and not row.kept:
            row = row.outer
        return row is not None

    def _keep(self, learned: Learned, row: _Row) -> None:
        if row.level == "module":
            changed = self._changes_of(row.function)
            if changed:
                tell_once(
                    self._call.profile,
                    f"the result of {row.path!r} in region {self._region!r} cannot be kept: its forward changes {changed}, and a replay "
                    "that does not run it would not see that. It is computed again; keep calls inside it instead",
                )
                return
        row.kept = True
        if row.function is F.linear and row.around is not None and type(row.around.function) is nn.Linear:
            learned.linears[id(row.around.function)] = weakref.ref(row.around.function)
        if row.written:
            learned.copied.add(Learned.key_of(row.function, row.index))

    def _changes_of(self, module: nn.Module) -> str:
        """Attributes and buffers that the module itself changes in its forward, as far as audits have seen; not batch statistics."""
        inside = [m for m in module.modules() if not isinstance(m, nn.modules.batchnorm._NormBase)]
        own, tables = {id(m.__dict__) for m in inside}, {id(m.__dict__["_buffers"]) for m in inside}
        found: list[str] = []
        for watch, _ in self._call.watches:
            found += [watch.path_of(table, name) for table, name in watch.changed if id(table) in own]
            found += watch.written_in(tables)
        return ", ".join(found)


def _nothing(_: Any) -> None:
    """Not to be told."""


class _Failed:
    """Stands for the result of a call that raised."""


_FAILED = _Failed()


def name(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Name a tensor, for policies that choose by name what is kept. Changes nothing, in a region or outside of one.

    What is named is the call that made the tensor, of a torch function or else of a module: it is that call's results that are kept.

    Args:
        tensor: of any shape.
        name: any text; several tensors may have the same.

    Returns:
        The tensor itself.

    >>> import torch
    >>> x = torch.ones(2)
    >>> name(x, "attn_out") is x
    True
    """
    if torch.compiler.is_compiling():
        from lowtide.engine._compiled import named

        return named(tensor, name)
    if state.recorders:
        state.recorders[-1].name(tensor, name)
    return tensor


def _name_of(compiled: Any) -> str:
    owner = getattr(compiled, "__self__", None)
    return type(owner).__qualname__ if isinstance(owner, nn.Module) else str(getattr(compiled, "__qualname__", "a function"))


def _on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return func._schema.name in _NO_KERNEL or any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def paths_of(root: nn.Module) -> dict[int, str]:
    prefix = getattr(root.__dict__.get("forward"), "path", "")
    return {id(m): ".".join(filter(None, (prefix, path))) for path, m in root.named_modules(remove_duplicate=False)}


def _tensors_in(value: Any) -> list[torch.Tensor] | None:
    try:
        return tensors_in(value)
    except InvalidInputError:
        return None
