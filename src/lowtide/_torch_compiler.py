"""What lowtide needs of ``torch.compile`` that has no public name. All of it was read in 2.11, 2.13 and 2.14.

Its parts take long to import, and do not concern those who compile nothing: they are imported where they are there already.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback

# What compiles each Python function that this thread calls; none where nothing is to be compiled.
current: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
set_current: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def tracing() -> bool:
    """Whether the ops that this thread runs are recorded in a graph: by ``make_fx``, AOTAutograd or ``torch.export``."""
    return torch._C._get_dispatch_mode(_PROXY) is not None


_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY


def skip(code: CodeType) -> None:
    """``torch.compile`` runs this code as it is where it meets it outside a graph; inside it is still looked through."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


def entry() -> CodeType | None:
    """The code through which everything compiled is entered; none as long as nothing was compiled.

    The compiler may be just about to be imported: the first call of a custom op does that.
    """
    context = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_TorchDynamoContext", None)
    if context is None or _entry:
        return _entry[0] if _entry else None
    consts = context.__call__.__code__.co_consts
    _entry.append(next((const for const in consts if isinstance(const, CodeType) and const.co_name == "compile_wrapper"), None))
    return _entry[0]


_entry: list[CodeType | None] = []


def at_each_entry(frame: FrameType, enter: Callable[[], Callable[[], None]]) -> None:
    """Whenever the compiled code is entered that this frame is about to enter, call a function; when it is left, what that returned."""
    context = frame.f_locals.get("self")
    if context is not None and enter not in context.enter_exit_hooks:
        context.enter_exit_hooks.append(enter)


def taken_apart(compiled: Any) -> tuple[Callable[..., Any], Any] | None:
    """What compiles, and what it is that it compiles; ``None`` for what is not compiled."""
    if entry() is None:
        return None
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(compiled, OptimizedModule):
        return compiled.dynamo_ctx, compiled._orig_mod
    if isinstance(compiled, torch.nn.Module):  # by its own method ``compile``
        apart = taken_apart(compiled._compiled_call_impl)
        return None if apart is None else (apart[0], compiled._call_impl)
    if not isinstance(compiled, FunctionType) or compiled.__code__ is not entry():
        return None
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
    return cells["self"].cell_contents, cells["fn"].cell_contents


def begin_anew(reason: str) -> None:
    """Have the compiler look at the function that it compiles once more from its beginning.

    The graph may have been run up to the middle of a function transform, which nobody would end: it is ended here. (2.11 ends some itself,
    and then fails.)
    """
    from torch._dynamo import exc

    depth = _transforms_at_entry()
    if depth != torch._C._functorch.get_dynamic_layer_stack_depth():
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        if depth == 0:  # the first of them had forbidden hooks
            torch._C._autograd._saved_tensors_hooks_enable()

    class BeginAnew(exc.TensorifyScalarRestartAnalysis, exc.UnspecializeRestartAnalysis):
        """The first passes through what compiles graphs, the second has the compiler forget the way that it went."""

    raise BeginAnew(restart_reason=reason)


def break_graph() -> None:
    """What the compiler traces ends here, and goes on as Python."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()


def _transforms_at_entry() -> int:
    """How many function transforms were under way when what is being compiled was called."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is entry():
            return int(frame.f_locals["saved_dynamic_layer_stack_depth"])
        frame = frame.f_back
    return 0


def graph_meta() -> dict[str, Any]:
    """What is known of the node of the compiler's graph that is being run."""
    return fx_traceback.current_meta


def size_hint(size: int | torch.SymInt) -> int:
    """A size, or what a symbol stands for in the step that is traced."""
    return size if isinstance(size, int) else int(size.node.hint)


class _Off:
    """Who wants nothing to be compiled: the stance is one for all threads, so the first takes it and the last gives it back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.stance: Any = None

    def enter(self) -> None:
        with self.lock:
            if self.count == 0:
                self.stance = torch.compiler.set_stance("force_eager")
            self.count += 1

    def leave(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0:
                self.stance.__exit__(None, None, None)


_off = _Off()


@contextmanager
def off() -> Iterator[None]:
    """Nothing is compiled in here, and what was compiled runs as Python.

    Code that the compiler comes upon under a dispatch mode, it would not look at ever again.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    around = set_current(None)
    try:
        _off.enter()
        try:
            yield
        finally:
            _off.leave()
    finally:
        set_current(around)


@contextmanager
def compiled_often() -> Iterator[None]:
    """A step may be compiled for each of many plans in here; what that leaves in the compiler's caches is dropped afterwards.

    Beyond a limit of versions the compiler would not look at a function any more, in here or ever after.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo import config

    before = dict(_versions())
    try:
        with config.patch(recompile_limit=10_000, accumulated_recompile_limit=100_000):
            yield
    finally:
        for code, count in list(_versions()):
            if count > before.get(code, 0) + 1:
                reset_code(code)


def _versions() -> Iterator[tuple[CodeType, int]]:
    """The functions that the compiler came upon, and how many versions it holds of each."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    for code in [ref() for ref in input_codes.seen]:
        if code is not None:
            yield code, len(_debug_get_cache_entry_list(code))


def graph_break_reason() -> str:
    """Why the compiler last gave up on a graph, in a line."""
    from torch._dynamo.utils import counters

    reasons = list(counters["graph_break"])
    if not reasons:
        return "see TORCH_LOGS=graph_breaks,recompiles"
    title, _, rest = reasons[-1].partition("\n  Explanation: ")
    return " ".join(f"{title}: {rest.partition('Hint:')[0]}".split()).rstrip(".")


@contextmanager
def compiled_always() -> Iterator[None]:
    """What is compiled in here goes through the partitioner, whatever a cache has, however often the same code was compiled before.

    Shapes are what they are: code that blocks of several shapes share would else be compiled for symbols from the second shape on, which is
    slower, and another graph each time that it is compiled.
    """
    from torch._dynamo import config
    from torch._functorch import config as functorch_config

    with (
        config.patch(recompile_limit=10_000, accumulated_recompile_limit=100_000, automatic_dynamic_shapes=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@contextmanager
def compiled_by(other_than: Callable[[Any], Any]) -> Iterator[None]:
    """What is compiled in here is compiled by other backends; the compiler keeps what each has made beside what others have.

    Args:
        other_than: given the backend that ``torch.compile`` was called with, returns the one to take, which may be the same.
    """
    from torch._dynamo import eval_frame

    callback_of, callbacks = eval_frame._callback_from_stance, dict[int, Any]()

    def callback_of_another(callback: Any) -> Any:
        callback = callback_of(callback)
        if callback in (None, False):
            return callback
        backend = _backend(callback)
        other = other_than(backend)
        if other is backend:
            return callback
        if id(other) not in callbacks:
            callbacks[id(other)] = eval_frame._create_wrapped_callback(eval_frame.get_compiler_fn(other))
        return callbacks[id(other)]

    eval_frame._callback_from_stance = callback_of_another
    try:
        yield
    finally:
        eval_frame._callback_from_stance = callback_of


def _backend(callback: Any) -> Any:
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback
