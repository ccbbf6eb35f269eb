"""The replay of a region that kept results: they are returned in place of being computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch_private as private
from lowtide.engine._kept._finding import Finder, Key, Pack
from lowtide.engine._kept._kept import Kept

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame
    from lowtide.engine._kept._learned import Choice, Learned


class Returning(Finder):
    """Finds the kept calls of a replay.

    A replay may be asked for again only where the backward leaves its graph, so otherwise what was returned is let go of.
    """

    def __init__(self, frame: Frame, kept: dict[Key, Kept], learned: Learned, choice: Choice, pack: Pack) -> None:
        super().__init__(choice, pack)
        self._frame, self._kept, self._learned = frame, kept, learned
        self._release = private.in_backward() and not private.keeps_graph()

    def kept_call(self, key: Key, run: Callable[..., Any], args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """Return what the forward returned, after handing on what it saved; run it if that cannot be done."""
        kept = self._kept.get(key)
        if kept is None:
            return run(*args, **kwargs)
        held = kept.held(self._frame, given)
        if held is None:
            self._learned.copied.add(key)
            return run(*args, **kwargs)
        if not private.function_mode_count():
            done, result = self._return(key, kept, given, held)
        else:
            with private.without_function_modes():
                done, result = self._return(key, kept, given, held)
        return result if done else run(*args, **kwargs)

    def _return(self, key: Key, kept: Kept, given: list[torch.Tensor], held: dict[int, torch.Tensor]) -> tuple[bool, Any]:
        saved = kept.saved_again(self._frame, given, held)
        if saved is None:
            return False, None
        if self._release:
            kept.release(self._frame)
            del self._kept[key]
        pack = self._pack
        for tensor in saved:
            pack(tensor)
        if kept.calls is not None:
            self.calls.update(kept.calls)
        return True, kept.again(held)
