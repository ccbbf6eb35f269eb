"""The replay of a region that kept results: they are returned in place of being computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch_private as private
from lowtide.engine._kept._applied import KeptApplied
from lowtide.engine._kept._finding import Finder, Key, Pack
from lowtide.engine._kept._kept import NO_RESULT, Kept, Result, kinds_of

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame
    from lowtide.engine._kept._keeping import Keeping


_NOTHING_HELD: dict[int, torch.Tensor] = {}


class Returning(Finder):
    """Finds the kept calls of a replay.

    A replay may be asked for again only where the backward leaves its graph, so otherwise what was returned is let go of.

    A replay may leave out calls of its forward, and make others: what is done ``if not is_replaying()``. So a call is told by the line
    that it comes from. Where what it is given is of another kind, or other tensors were saved before it, every call is run from there on.
    """

    def __init__(self, frame: Frame, keeping: Keeping, pack: Pack, count: Callable[[], int], stop: int) -> None:
        super().__init__(keeping.choice, pack, keeping.deep)
        self._frame, self._kept, self._learned = frame, keeping.kept, keeping.learned
        self._calls, self._sites = dict.fromkeys(keeping.sites, 0), keeping.sites
        self._count, self._stop = count, stop
        self._lost = False
        self._release = private.in_backward() and not private.keeps_graph()

    def counted(self, key: Any, site: int) -> int:
        """The next one from this line; none of the forward's if there is none."""
        sites, index = self._sites[key], self._calls[key]
        if index >= len(sites) or sites[index] != site:
            try:
                index = sites.index(site, index)
            except ValueError:
                return -1
        self._calls[key] = index + 1
        return index

    def calls(self) -> dict[Any, int]:
        """As many as there were in the forward up to here."""
        return self._calls

    def _found(self, key: Key, given: list[torch.Tensor]) -> Kept | None:
        """What is kept of a call; ``None`` if it has to be run."""
        kept = self._kept.get(key)
        if kept is not None and (kept.first != self._count() or kinds_of(given) != kept.kinds):
            self._lost = True
        return None if self._lost else kept

    def kept_call(self, key: Key, run: Callable[..., Any], args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """Return what the forward returned, after handing on what it saved; run it if that cannot be done."""
        kept = self._found(key, given)
        if kept is None:
            return run(*args, **kwargs)
        frame, result = self._frame, kept.result
        if result is NO_RESULT:
            self._end_with(kept, given)
            return run(*args, **kwargs)
        if type(result) is not Result or result.copied or kept.after is not None or frame.packs_kept or private.function_mode_count():
            return self._return_any(key, kept, run, args, kwargs, given)
        tensor = frame.held[result.index]
        if tensor is None or (tensor._version != result.version and result.version is not None):
            self._learned.copied.add(key)
            return run(*args, **kwargs)
        saved = kept.saved_again(frame, given, _NOTHING_HELD)
        if saved is None:
            return run(*args, **kwargs)
        if self._release:
            frame.held[result.index] = None
            del self._kept[key]
        else:
            tensor = tensor.detach()
        pack = self._pack
        for again in saved:
            pack(again)
        return tensor.requires_grad_() if result.requires_grad else tensor

    def _end_with(self, kept: Kept, given: list[torch.Tensor]) -> None:
        """End the replay if the call is the last of it: what it would save is at hand. To be thrown out of its kernel would take longer."""
        if self._stop >= kept.first + len(kept.origins) or private.function_mode_count():
            return
        saved = kept.saved_again(self._frame, given, _NOTHING_HELD)
        if saved is not None:
            for again in saved:
                self._pack(again)

    def _return_any(self, key: Key, kept: Kept, run: Callable[..., Any], args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """The same for results of any kind, in a longer way."""
        held = kept.held(self._frame)
        if held is None:
            self._learned.copied.add(key)
            return run(*args, **kwargs)
        with private.without_function_modes():
            done, result = self._return(key, kept, given, held)
        return result if done else run(*args, **kwargs)

    def _return(self, key: Key, kept: Kept, given: list[torch.Tensor], held: dict[int, torch.Tensor]) -> tuple[bool, Any]:
        saved = kept.saved_again(self._frame, given, held)
        if saved is None:
            return False, None
        pack = self._pack
        self._done_with(key, kept)
        for tensor in saved:
            pack(tensor)
        return True, kept.again(held)

    def kept_apply(self, key: Key, run: Callable[..., Any], args: Any, context: Any, given: list[torch.Tensor]) -> Any:
        """Return what the forward of an autograd Function returned, with what it had its context save handed to that."""
        kept = self._found(key, given)
        if not isinstance(kept, KeptApplied) or kept.result is NO_RESULT:
            return run(*args)
        with private.without_function_modes():
            held = kept.held(self._frame)
            if held is None:
                self._learned.copied.add(key)
                return run(*args)
            done, result = kept.give_again(self._frame, context, given, held)
            if not done:
                return run(*args)
            self._done_with(key, kept)
        return result

    def _done_with(self, key: Key, kept: Kept) -> None:
        """It was given back: the functions called in it count as called, and if no other replay can ask for it, it is let go of."""
        if self._release:
            kept.release(self._frame)
            del self._kept[key]
        if kept.after is not None and kept.after.calls is not None:
            self._calls.update(kept.after.calls)
            self.place = kept.after.place
