"""The forward of one call, and how its replay finds again what the forward had: inputs, surroundings and state.

The engine's own record of a call does that: inputs are checked for changes made in place before backward, they pass through
the saved-tensor hooks that surround the region, and a region inside another leaves them to the outer one. Lists, counters and other
Python values are not put back for a replay: that is what PyTorch's users count replays with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import noop_context_fn

from lowtide import _torch_private
from lowtide.engine._audit import Audit
from lowtide.engine._call import Call as EngineCall
from lowtide.engine._call import NotInitializedError
from lowtide.engine._checkpoint import _module_of as module_of
from lowtide.engine._checkpoint import _name_of as name_of
from lowtide.engine._guards._random import take_random
from lowtide.engine._learning import Before
from lowtide.engine._observers import switch, tell_entered, tell_entering, tell_left, tell_replayed
from lowtide.engine._options import Options
from lowtide.engine._profile import profile_of
from lowtide.engine._region import Region
from lowtide.engine._region import _is_news as is_news
from lowtide.engine._thread import hooks_work, in_replay, is_replaying
from lowtide.engine._transforms import transforms_allowed_in
from lowtide.engine._unpack import unpack
from lowtide.torch_compat import _messages, _settings
from lowtide.torch_compat._closure import Captured
from lowtide.torch_compat._frame import Describe, Rules, StrictFrame, describe, describe_nothing

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

_OPTIONS = Options(python_state=False)
_CHECKS: dict[str, Describe] = {"default": describe, "none": describe_nothing}


@dataclass(frozen=True)
class Call:
    """What was asked for in one call, in PyTorch's words.

    Attributes:
        preserve_rng_state: a replay draws what the forward drew.
        context_fn: makes the contexts in which forward and replay run.
        determinism_check: ``"default"`` compares shapes, types and devices, ``"none"`` nothing.
        debug: a mismatch lists the ops of forward and replay.
        early_stop: a replay ends as soon as it has made what backward needs.
        respect_saved_tensors_hooks: what selective contexts keep passes through the saved-tensor hooks around the call; ``None`` leaves
            it to PyTorch, which does so from some release on.
        give_once: see ``Rules``.
    """

    preserve_rng_state: bool = True
    context_fn: ContextFn = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    respect_saved_tensors_hooks: bool | None = None
    give_once: bool = True


def _contexts(asked: Call) -> tuple[ContextFn, Callable[[Exception], object] | None]:
    if not _settings.debug_in_force(asked.debug):
        return asked.context_fn, None
    if asked.context_fn is not noop_context_fn:
        raise ValueError("debug=True is incompatible with non-default context_fn: it needs those contexts for its own log of ops")
    return _torch_private.checkpoint_debug()


def _check_of(name: str) -> Describe:
    if name not in _CHECKS:
        raise ValueError(f"determinism_check should be one of {list(_CHECKS)}, but got {name!r}")
    return _CHECKS[name]


class _Again:
    """How a frame's call is run again. It does not hold the frame, which holds it: there must be no cycle."""

    def __init__(self, fn: Callable[..., Any], call: EngineCall, context: AbstractContextManager[Any], preserve_rng_state: bool) -> None:
        self.captured = Captured(fn)
        self._call = call
        self._context = context
        self._preserve_rng_state = preserve_rng_state

    def __call__(self, frame: StrictFrame) -> None:
        _, args, kwargs = self._call.arguments(frame, [])
        if not self._preserve_rng_state:
            self._call.random = take_random()
        start = time.perf_counter()
        try:
            with in_replay(keeps=True), transforms_allowed_in(self._call):
                self._call.run(frame.region.name, _in_context(self.captured.function(), self._context), args, kwargs)
        finally:
            tell_replayed(frame, time.perf_counter() - start)


class _Entered:
    """A call that was entered.

    Attributes:
        frame: its slots.
        call: the engine's record of the state around it.
        profile: what the engine learned of the function.
        unknown: the call is to be watched, to learn what its replays need.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], rules: Rules) -> None:
        self.frame = StrictFrame(Region(name_of(fn), _OPTIONS), rules)
        self.profile = profile_of(fn)
        tell_entering(self.frame.region, self.profile)
        self.frame.enter(self.profile.copied)
        self.frame.given = args, kwargs
        self.call = EngineCall(self.frame, fn, module_of(fn), self.profile, args, kwargs)
        self.frame.given = ()
        self.frame.calls.append(self.call)
        tell_entered(self.frame, self.call)
        self.unknown = not is_replaying() and (self.profile.left <= 0 or is_news(self.call))

    def note(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None]:
        """Note what the call can reach, without watching its ops; what is returned learns from what changed."""
        if not self.unknown:
            return _nothing
        before = Before(self.frame, self.call, fn, args, kwargs)

        def learn() -> None:
            before.learn(draws=False)
            for watch, taken in self.call.watches:
                watch.audited = True
                watch.ways.add(self.call.way())
                if taken[2] not in watch.trainings:
                    watch.trainings.append(taken[2])
            self.profile.flags.add(self.call.flags())

        return learn

    def leave(self, again: _Again) -> None:
        """The forward returned."""
        self.frame.leave(self.call)
        again.captured.forward_done()
        tell_left(self.frame, self.call)


def _enter(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], asked: Call
) -> tuple[_Entered, _Again, AbstractContextManager[Any]] | None:
    """Check what was asked for and enter the call; ``None`` where it is to be left alone, as where no gradients are recorded."""
    context_fn, on_mismatch = _contexts(asked)
    check = _check_of(asked.determinism_check)
    in_forward, around_replay = context_fn()
    if isinstance(in_forward, _torch_private.CachingMode):
        in_forward.respect_saved_tensors_hooks = asked.respect_saved_tensors_hooks
    if not torch.is_grad_enabled() or not hooks_work() or switch.off:
        return None
    rules = Rules(_settings.early_stop_in_force(asked.early_stop), asked.give_once, check, on_mismatch)
    try:
        entered = _Entered(fn, args, kwargs, rules)
    except NotInitializedError:
        return None
    again = _Again(fn, entered.call, around_replay, asked.preserve_rng_state)
    entered.frame.replay = again
    return entered, again, in_forward


def forward(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], asked: Call) -> Generator[None, None, None]:
    """Surround one call of ``fn``: advance it before the call, and once more after it; throw into it what the call raised.

    Args:
        fn: the region's function, which the caller calls with ``args`` and ``kwargs`` in between.
        args, kwargs: its arguments.
        asked: how it is to be replayed.

    Raises:
        ValueError: an unknown ``determinism_check``, or ``debug`` together with a ``context_fn``.
        RuntimeError: the forward's context swallowed an exception of ``fn``.
    """
    found = _enter(fn, args, kwargs, asked)
    if found is None:
        yield
        return
    entered, again, in_forward = found
    learn = entered.note(fn, args, kwargs)
    raised: BaseException | None = None
    with saved_tensors_hooks(entered.frame.pack_hook(), unpack), in_forward:
        try:
            yield
        except BaseException as error:
            raised = error
            raise
    if raised is not None:
        raise _messages.suppressed_exception()
    learn()
    entered.leave(again)


def run(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], asked: Call) -> Any:
    """Call ``fn`` as a region and return what it returns. Raises what ``forward`` does."""
    found = _enter(fn, args, kwargs, asked)
    if found is None:
        return fn(*args, **kwargs)
    entered, again, in_forward = found
    target = _passing_errors(fn, in_forward)
    entered.profile.left -= 1
    if entered.unknown and asked.context_fn is noop_context_fn:
        entered.call.audited = True
        result = Audit(entered.frame, entered.call, target).run(target, args, kwargs)
    else:
        learn = entered.note(fn, args, kwargs)
        with saved_tensors_hooks(entered.frame.pack_hook(), unpack), transforms_allowed_in(entered.call):
            result = target(*args, **kwargs)
        learn()
    entered.leave(again)
    return result


def _nothing() -> None:
    """There is nothing to learn."""


def _in_context(fn: Callable[..., Any], context: AbstractContextManager[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with context:
            return fn(*args, **kwargs)

    return call


def _passing_errors(fn: Callable[..., Any], context: AbstractContextManager[Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with context:
            return fn(*args, **kwargs)
        raise _messages.suppressed_exception()

    return call
