"""Regions inside ``torch.compile``: the compiler replays, by the decisions of the region's own policy.

The region becomes a part of the graph that is marked for recomputation, as PyTorch's own function would mark it. Which results
the compiler is to save is said op by op, while AOTAutograd runs that part (see ``_marks``). It does so at least twice: first to see what
is mutated, then to record the graph. As in the engine itself, the first run shows the calls, and what was decided holds from the second on.

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

import lowtide.engine
from lowtide import _torch_compiler as torch_compiler
from lowtide.engine._calls_in_graph import NAME, InGraph
from lowtide.engine._checkpoint import region_call
from lowtide.engine._function_members import ListeningForward
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
    if region.broken:
        torch_compiler.break_graph()
    if torch.compiler.is_compiling() and region.plain:
        return target(*args, **kwargs)
    if torch.compiler.is_compiling() and region.mark is not None:  # to read it has the compiler look at it before it takes a graph
        return _marked(lambda: target(*args, **kwargs), use_reentrant=False, context_fn=region.contexts)
    if not region.told:
        region.told = True
        warnings.warn(
            f"torch.compile could not take region {region.region.name!r} into a graph "
            f"({region.broken or torch_compiler.graph_break_reason()}): "
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


def _leave_engine_alone() -> None:
    """Have the compiler run the engine's functions as they are where they are not part of a graph."""
    entries = {InstalledForward.__call__.__code__, InstalledForward._run_under_compiler.__code__, *_with_inner(region_call.__code__)}
    entries.add(ListeningForward.__call__.__code__)
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
