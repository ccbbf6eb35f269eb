"""``checkpoint``: a callable made into a region."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import nn

from lowtide import _torch_compiler as torch_compiler
from lowtide.engine._calls_in_graph import InGraph
from lowtide.engine._observers import switch
from lowtide.engine._options import Options
from lowtide.engine._own import own_attribute
from lowtide.engine._profile import Profile, profile_of
from lowtide.engine._region import Region
from lowtide.errors import InvalidInputError

P = ParamSpec("P")
R = TypeVar("R")


@overload
def checkpoint(fn: Callable[P, R], **options: Any) -> Callable[P, R]: ...
@overload
def checkpoint(fn: None = None, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def checkpoint(fn: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Make a callable whose intermediate results are computed again in backward instead of being kept.

    Args:
        fn: a function, a module or any other callable. Without it, what comes back is a decorator.
        **options: fields of ``Options``.

    Returns:
        A callable with the signature of ``fn``: what it is called with is all passed on.

    Raises:
        InvalidInputError: ``fn`` cannot be called, or an option is unknown.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> checkpoint(torch.sin)(x).sum().backward()
    >>> x.grad.shape
    torch.Size([3])
    """
    chosen = _read(options)
    if fn is None:
        return lambda given: checkpoint(given, **options)
    if not callable(fn):
        raise InvalidInputError(f"checkpoint needs something to call, not {type(fn).__name__}: pass the function, not its result")
    return region_call(Region(_name_of(fn), chosen), profile_of(fn), _module_of(fn), fn)


def region_call(region: Region, profile: Profile, fixed: nn.Module | None, fn: Callable[..., Any]) -> Callable[..., Any]:
    """What calls ``fn`` as a region."""
    if region.options.policy is not None:
        compiled = torch_compiler.taken_apart(fn)
        if compiled is not None:
            return _compiled_around(region, fn, *compiled)
    in_graph = InGraph(region, (lambda: None) if fixed is None else weakref.ref(fixed))

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return region.run(fn, fixed, profile, args, kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or switch.off:
            return fn(*args, **kwargs)
        if torch.compiler.is_compiling() or torch_compiler.current() is not None:
            if in_graph.broken:  # asked here: of what is looked at further inside before a break, the compiler remembers nothing
                torch_compiler.break_graph()
            from lowtide.engine._compiled import run_under_compiler

            return run_under_compiler(in_graph, run, fn, args, kwargs)
        return region.run(fn, fixed, profile, args, kwargs)

    functools.update_wrapper(call, fn, updated=())
    call.__lowtide_region__ = region  # type: ignore[attr-defined]
    # Itself, for decorators copy attributes of what they wrap; what it calls; and how to make one that calls what was taken apart.
    call.__lowtide_parts__ = weakref.ref(call), fn, functools.partial(region_call, region, profile, fixed)  # type: ignore[attr-defined]
    return call


def _compiled_around(region: Region, fn: Callable[..., Any], compiler: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """A region of something compiled, turned inside out: to decide about calls in it is to see them, so the region is compiled with it."""
    inside = compiler(region_call(region, profile_of(original), _module_of(original), original))

    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs) if switch.off else inside(*args, **kwargs)

    functools.update_wrapper(call, fn, updated=())
    call.__lowtide_region__ = region  # type: ignore[attr-defined]
    call.__lowtide_parts__ = weakref.ref(call), original, functools.partial(_compiled_anew, region, fn, compiler)  # type: ignore[attr-defined]
    return call


def _compiled_anew(region: Region, fn: Callable[..., Any], compiler: Callable[..., Any], original: Any) -> Callable[..., Any]:
    return _compiled_around(region, fn, compiler, original)


def _read(options: dict[str, Any]) -> Options:
    try:
        return Options(**options)
    except TypeError as error:
        known = ", ".join(Options.__dataclass_fields__)
        raise InvalidInputError(f"checkpoint takes the options {known}, but was given {', '.join(options)}") from error


def _name_of(fn: Callable[..., Any]) -> str:
    return own_attribute(fn, "__qualname__") or type(fn).__qualname__


def _module_of(fn: Callable[..., Any]) -> nn.Module | None:
    owner = fn if isinstance(fn, nn.Module) else own_attribute(fn, "__self__")
    return owner if isinstance(owner, nn.Module) else None
