"""A region: something that can be called, whose calls are replayed in backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from lowtide import _torch_private as private
from lowtide.engine._frame import Frame
from lowtide.engine._guards._modules import Watch
from lowtide.engine._call import Call
from lowtide.engine._options import Options
from lowtide.engine._slot import unpack


class Region:
    """What all calls of a region share.

    Attributes:
        name: module path or function name, for errors.
        options: as chosen by the user.
        replay_s: seconds spent in its replays so far.
    """

    __slots__ = ("__weakref__", "_told", "name", "options", "replay_s")

    def __init__(self, name: str, options: Options) -> None:
        self.name = options.name or name
        self.options = options
        self.replay_s = 0.0
        self._told = False

    def run(self, target: Callable[..., Any], watch: Watch | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``target`` in a frame of its own. Only to be called where gradients are recorded."""
        if not private.hooks_allowed() or private.functorch_active():
            return self._run_plain(target, args, kwargs)
        return self.enter(Frame(self), target, watch, args, kwargs)

    def enter(self, frame: Frame, target: Callable[..., Any], watch: Watch | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``target`` as the next member of a frame."""
        frame.calls.append(Call(frame, target, watch, args, kwargs))
        private.push_hooks(frame.pack_hook(), unpack)
        try:
            return target(*args, **kwargs)
        finally:
            private.pop_hooks()

    def _run_plain(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Function transforms forbid hooks: gradients are right, no memory is saved."""
        if not self._told:
            self._told = True
            warnings.warn(f"region {self.name!r} runs under a function transform (torch.func), where its memory cannot be saved", stacklevel=4)
        return target(*args, **kwargs)


def recording() -> bool:
    """Whether gradients are being recorded: otherwise a region is just its function."""
    return torch.is_grad_enabled()
