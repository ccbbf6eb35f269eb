"""Regions inside ``torch.compile``: the compiler replays, by the decisions of the region's own policy.

The region becomes a part of the graph that is marked for recomputation, as PyTorch's own function would mark it. Which results
the compiler is to save is said op by op, while AOTAutograd runs that part. It does so at least twice: first to see what is mutated,
then to record the graph. As in the engine itself, the first run shows the calls, and what was decided holds from the second on.

Where the compiler cannot take a region into a graph, Python runs it, and the engine replays it. The engine's own code is nothing to
compile.

The compiler imports this module when it first meets a region, so that nobody else waits for the import of its parts.
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide.engine
from lowtide import _torch_compiler as torch_compiler
from lowtide.engine._calls_in_graph import NAME, InGraph, Run
from lowtide.engine._checkpoint import region_call
from lowtide.engine._install import InstalledForward

# As it is now: the name in its module may be given to another function, which the compiler does not know.
_marked: Any = torch.utils.checkpoint.checkpoint


def run_under_compiler(
    region: InGraph,
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a region where the compiler traces, or where it could not and has Python run what it would have compiled.

    Args:
        region: what it is to the compiler.
        run: runs it in the engine.
        target: what it calls.
        args, kwargs: its arguments.
    """
    if torch.compiler.is_compiling():
        return _marked(lambda: target(*args, **kwargs), use_reentrant=False, context_fn=region.contexts)
    if not region.told:
        region.told = True
        warnings.warn(
            f"torch.compile could not take region {region.region.name!r} into a graph ({torch_compiler.graph_break_reason()}): "
            "it is run and replayed as Python, with nothing in it compiled",
            stacklevel=3,
        )
    return without_compiler(run, args, kwargs)


def graph_or_python(mark: Callable[[], Any], run: Callable[[], Any]) -> Any:
    """What the compiler is to make of a region, or where it cannot, what Python is to do instead."""
    return mark() if torch.compiler.is_compiling() else without_compiler(run)


def without_compiler(run: Callable[..., Any], *args: Any) -> Any:
    """Call something with nothing in it compiled.

    What is compiled piece by piece may be compiled anew between a forward and its replay, which would then save other tensors.
    """
    compiler = torch_compiler.set_current(None)
    try:
        return run(*args)
    finally:
        torch_compiler.set_current(compiler)


def named(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A node of the graph that tells the name of what it is given."""
    with torch.fx.traceback.annotate({NAME: name}):
        return tensor.view_as(tensor)


class _Forward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's mode that marks what to save, together with the one that sees the calls. The compiler wants a dispatch mode."""

    def __init__(self, marks: Any, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marks, self._run = marks, run

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler need not look out for it: it changes nothing."""
        return True

    @property
    def ac_graph_id(self) -> Any:
        """Which part of the graph it marks; PyTorch sets it."""
        return self._marks.ac_graph_id

    @ac_graph_id.setter
    def ac_graph_id(self, value: Any) -> None:
        self._marks.ac_graph_id = value

    def __enter__(self) -> Any:
        self._run.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._run.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._marks.__torch_dispatch__(func, types, args, kwargs)


def contexts_of(region: InGraph) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The modes under which the compiler runs a region forward and again, to mark what it saves."""
    run = region.run()

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if run.saves(op) else CheckpointPolicy.MUST_RECOMPUTE

    caching, cached = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return _Forward(caching, run), cached


def contexts_that_keep_nothing() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The same for a region of which the compiler saves nothing."""
    contexts: Any = create_selective_checkpoint_contexts(_recompute)  # type: ignore[no-untyped-call]
    return contexts  # type: ignore[no-any-return]


def _recompute(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _leave_engine_alone() -> None:
    """Have the compiler run the engine's functions as they are where they are not part of a graph."""
    entries = {InstalledForward.__call__.__code__, InstalledForward._run_under_compiler.__code__, *_with_inner(region_call.__code__)}
    for info in pkgutil.walk_packages(lowtide.engine.__path__, "lowtide.engine."):
        module = sys.modules.get(info.name)
        for code in () if module is None else _codes_in(vars(module), info.name):
            if code not in entries:
                torch_compiler.skip(code)


def _codes_in(names: dict[str, Any], module: str) -> Iterator[CodeType]:
    for value in list(names.values()):
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, FunctionType):
            yield from _with_inner(value.__code__)
        elif isinstance(value, type):
            parts = [getattr(part, "fget", None) or getattr(part, "__func__", part) for part in vars(value).values()]
            for part in parts:
                if isinstance(part, FunctionType):
                    yield from _with_inner(part.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _with_inner(const)


_leave_engine_alone()
