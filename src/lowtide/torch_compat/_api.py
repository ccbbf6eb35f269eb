"""The functions that PyTorch's users call: ``checkpoint`` in both forms and ``checkpoint_sequential``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from lowtide import _torch_compiler, _torch_private
from lowtide.torch_compat._reentrant import run_reentrant
from lowtide.torch_compat._region import Call, ContextFn, forward, run

# Inside torch.compile the compiler chooses what is run again. It knows PyTorch's own function, and of its options only those passed.
_theirs = torch.utils.checkpoint.checkpoint
_their_generator_impl, _their_generator = _torch_private.CHECKPOINT_GENERATORS
_USUAL = (
    *(("use_reentrant", None), ("preserve_rng_state", True), ("context_fn", noop_context_fn)),
    *(("determinism_check", "default"), ("debug", False), ("early_stop", True)),
)


def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint.checkpoint``, on lowtide's engine.

    Args:
        function: what to run now, and again in backward. Without it, what comes back is a decorator with these options.
        args: for ``function``.
        use_reentrant: ``False`` for the form that PyTorch recommends. ``True`` keeps the limits of the other form (no
            ``torch.autograd.grad``, no ``inputs=``, no keywords), but not its wrong results: gradients reach weights when no input
            needs one, and tensors in containers. It should be passed; without it PyTorch warns and takes ``True``.
        preserve_rng_state: a replay draws what the forward drew.
        context_fn: returns a context for the forward and one for the replay.
        determinism_check: ``"default"`` compares shapes, types and devices of replayed tensors with the forward's; ``"none"`` does not.
        debug: a mismatch lists every op of forward and replay.
        early_stop: end a replay as soon as it has made what backward needs.
        kwargs: for ``function``; from PyTorch 2.14 on without ``respect_saved_tensors_hooks``, which says whether what selective
            contexts keep passes through the saved-tensor hooks around the call.

    Returns:
        What ``function`` returns.

    Raises:
        ValueError: options that exclude each other, or keywords for the reentrant form.
        CheckpointError: in backward, when a replay does not match.
    """
    if torch.compiler.is_compiling() or _torch_compiler.tracing():
        options: tuple[Any, ...] = (use_reentrant, preserve_rng_state, context_fn, determinism_check, debug, early_stop)
        given = {name: value for (name, usual), value in zip(_USUAL, options, strict=True) if value is not usual}
        if not torch.compiler.is_compiling():
            return _theirs(function, *args, **given, **kwargs)
        from lowtide.engine._calls_in_graph import keep_nothing
        from lowtide.engine._compiled import graph_or_python

        if not use_reentrant:  # PyTorch's own mode does not notice what the compiler would replay wrongly
            given.setdefault("context_fn", keep_nothing)

        return graph_or_python(
            lambda: _theirs(function, *args, **given, **kwargs),
            lambda: checkpoint(function, *args, **given, **kwargs),
        )
    respects = kwargs.pop("respect_saved_tensors_hooks", None) if _torch_private.MODES_RESPECT_HOOKS else None
    asked = Call(preserve_rng_state, context_fn, determinism_check, debug, early_stop, respects)
    if function is None:
        _refuse_keywords(kwargs)
        return functools.partial(_decorate, asked, use_reentrant)
    return _run(function, args, kwargs, asked, use_reentrant)


def _decorate(asked: Call, use_reentrant: bool | None, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def region(*args: Any, **kwargs: Any) -> Any:
        return _run(function, args, kwargs, asked, use_reentrant)

    return region


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], asked: Call, use_reentrant: bool | None) -> Any:
    if use_reentrant is None:
        _warn_of_default("checkpoint", stacklevel=4)
        use_reentrant = True
    if not use_reentrant:
        return run(function, args, kwargs, asked)
    _refuse_keywords(kwargs)
    if asked.context_fn is not noop_context_fn or asked.debug is not False or asked.respect_saved_tensors_hooks is not None:
        raise ValueError("Passing `context_fn`, `debug` or `respect_saved_tensors_hooks` is only supported when use_reentrant=False.")
    return run_reentrant(function, args, asked.preserve_rng_state)


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """``torch.utils.checkpoint.checkpoint_sequential``: all segments but the last are regions.

    Args:
        functions: to run one after the other, split into equal counts.
        segments: how many; the last takes what is left over.
        input: for the first of ``functions``; each gets what the one before returned.
        use_reentrant: as for ``checkpoint``.
        kwargs: ``preserve_rng_state`` and nothing else.

    Returns:
        What the last of ``functions`` returns.

    Raises:
        ValueError: an unknown keyword.
    """
    if use_reentrant is None:
        _warn_of_default("checkpoint_sequential", stacklevel=3)
        use_reentrant = True
    preserve = kwargs.pop("preserve_rng_state", True)
    _refuse_keywords(kwargs)
    # Not its children, which PyTorch takes: those leave out a module's second use.
    parts: list[Callable[..., Any]] = list(functions)
    length = len(parts) // segments
    last = length * (segments - 1)
    value = input
    for start in range(0, last, max(length, 1)):
        value = checkpoint(_chain(parts[start : start + length]), value, use_reentrant=use_reentrant, preserve_rng_state=preserve)
    return _chain(parts[last:])(value)


def _chain(parts: Sequence[Callable[..., Any]]) -> Callable[[Any], Any]:
    def segment(value: Any) -> Any:
        for part in parts:
            value = part(value)
        return value

    return segment


def _warn_of_default(name: str, stacklevel: int) -> None:
    warnings.warn(
        f"torch.utils.checkpoint.{name}: the use_reentrant parameter should be passed explicitly; True is taken, which is PyTorch's "
        "default for now. use_reentrant=False is recommended.",
        stacklevel=stacklevel + 1,
    )


def _refuse_keywords(kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))


class CheckpointFunction(torch.autograd.Function):
    """Offers ``CheckpointFunction.apply(function, preserve_rng_state, *args)``, the reentrant form by its older name."""

    @classmethod
    def apply(cls, run_function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Run a region in the reentrant form.

        Args:
            run_function: what to run now, and again in backward.
            preserve_rng_state: a replay draws what the forward drew.
            args: for ``run_function``.

        Returns:
            What ``run_function`` returns.
        """
        return run_reentrant(run_function, args, preserve_rng_state)


def checkpoint_without_reentrant_generator(
    fn: Callable[..., Any],
    preserve_rng_state: bool = True,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    *args: Any,
    **kwargs: Any,
) -> Generator[None, None, None]:
    """What ``torch.distributed`` calls: advanced once before a module's forward and once after it, from its hooks.

    Also what PyTorch's own ``checkpoint`` calls while the compiler traces, which is left to PyTorch.
    """
    if torch.compiler.is_compiling() or _torch_compiler.tracing():
        return _their_generator(  # type: ignore[no-any-return]
            fn, preserve_rng_state, context_fn, determinism_check, debug, early_stop, *args, **kwargs
        )
    return forward(fn, args, kwargs, Call(preserve_rng_state, context_fn, determinism_check, debug, early_stop))


def checkpoint_without_reentrant_generator_impl(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> Generator[None, None, None]:
    """The same as PyTorch calls it from 2.14 on; ``options`` are the fields of ``Call``."""
    if torch.compiler.is_compiling() or _torch_compiler.tracing():
        return _their_generator_impl(fn, args, kwargs, **options)  # type: ignore[no-any-return]
    return forward(fn, args, kwargs, Call(**options))
