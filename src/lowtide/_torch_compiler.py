"""What lowtide needs of ``torch.compile`` that has no public name. All of it was read in 2.11, 2.13 and 2.14.

Its parts take long to import, and do not concern those who compile nothing: they are imported where they are there already.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import torch.fx.traceback as fx_traceback

# What compiles each Python function that this thread calls; none where nothing is to be compiled.
current: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
set_current: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


def skip(code: CodeType) -> None:
    """``torch.compile`` runs this code as it is where it meets it outside a graph; inside it is still looked through."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


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
    """What is compiled in here goes through the partitioner, whatever a cache has, and however often the same code was compiled."""
    from torch._dynamo import config
    from torch._functorch import config as functorch_config

    with config.patch(recompile_limit=10_000, accumulated_recompile_limit=100_000), functorch_config.patch(enable_autograd_cache=False):
        yield
