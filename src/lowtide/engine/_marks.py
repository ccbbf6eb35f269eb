"""The modes under which the compiler runs a region's part of its graph, to mark what it is to save.

Regions inside a region are part of it: what the outermost one decides holds for their calls too, for nothing of them outlives its replay.
The members of a region of several modules carry one number: between parts of the graph with different ones the compiler saves what one
hands to the next, and what a region's own members hand on is made again.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from lowtide import _torch_compiler as torch_compiler
from lowtide import _torch_private as private
from lowtide.engine._written import Touched
from lowtide.errors import ReplayError

if TYPE_CHECKING:
    from lowtide.engine._calls_in_graph import InGraph, Run
    from lowtide.engine._region import Region


class _Traced(threading.local):
    """What the compiler runs in this thread.

    Attributes:
        open: the regions that it is in, outermost first.
        left: of the region that it left last, weakly, with which of its members that was, and the number of that part of the graph.
    """

    def __init__(self) -> None:
        self.open: list[Forward] = []
        self.left: tuple[weakref.ref[Region], int, Any] | None = None


_traced = _Traced()


class Forward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's mode that marks what to save, together with the one that sees the calls. The compiler wants a dispatch mode.

    Args:
        region: what it is to the compiler; none if nothing is known of it but that it keeps nothing.
        run: the one that sees the calls, where there is a policy to ask about them.

    Attributes:
        decided: what becomes of the result of the op that ran last.
    """

    def __init__(self, region: InGraph | None, run: Run | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region, self._run = region, run
        self._around: Forward | None = None
        self._number: Any = None
        self._marks, self.replay = create_selective_checkpoint_contexts(self._decide)  # type: ignore[no-untyped-call]
        self._touched = Touched()
        self.decided = CheckpointPolicy.MUST_RECOMPUTE

    def _decide(self, _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = self._run is not None and self._run.saves(op)
        own = CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.MUST_RECOMPUTE
        self.decided = own if self._around is None else self._around.decided
        return self.decided

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The compiler need not look out for it: it changes nothing."""
        return True

    @property
    def ac_graph_id(self) -> Any:
        """The number of the part of the graph that it marks. PyTorch sets it, from 2.13 on; before it was a mark of each call."""
        return self._number

    @ac_graph_id.setter
    def ac_graph_id(self, value: Any) -> None:
        self._number = self._marks.ac_graph_id = value

    def __enter__(self) -> Any:
        traced = _traced
        if traced.open:
            self._around = traced.open[0]
        else:
            self._join()
        traced.open.append(self)
        if self._run is not None:
            self._run.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def _join(self) -> None:
        """Go on with the number of the member before, if that was the last that ran."""
        left, _traced.left = _traced.left, None
        if left is None or self._region is None or left[1] + 1 != self._region.member or left[0]() is not self._region.region:
            return
        self.ac_graph_id = left[2]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _traced.open.pop()
        if self._region is not None and not _traced.open and error[0] is None:
            _traced.left = weakref.ref(self._region.region), self._region.member, self._number
        if self._run is not None:
            self._run.__exit__(*error)
        if error[0] is None:
            self._check_unwritten()
        elif self._region is not None and isinstance(error[1], RuntimeError) and "saved tensor hooks" in str(error[1]):
            self._leave_out("it contains transforms of torch.func")

    def _check_unwritten(self) -> None:
        """Have the compiler begin anew, without this region in the graph, if it could not be replayed rightly."""
        written = self._touched.written()
        if written is None:
            return
        why = f"it reads a tensor of shape {tuple(map(torch_compiler.size_hint, written.shape))} from elsewhere and writes to it"
        if self._region is None:
            raise ReplayError(
                f"torch.compile cannot replay a region rightly that is made where it is called: {why}; make it once, outside of what is "
                "compiled, with lowtide.checkpoint(function) or lowtide.apply(model, …), so that it can be left to Python"
            )
        self._leave_out(why)

    def _leave_out(self, why: str) -> None:
        assert self._region is not None
        self._region.broken = why
        torch_compiler.begin_anew(why)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meta = torch_compiler.graph_meta()
        if self._around is None and "ac_graph_id" in meta:
            if self._number is None:
                self._number = meta["ac_graph_id"]
            meta["ac_graph_id"] = self._number
        kwargs = kwargs or {}
        if self._around is not None:
            return self._marks.__torch_dispatch__(func, types, args, kwargs)
        shown = self._touched.before(func, args, kwargs)
        result = self._marks.__torch_dispatch__(func, types, args, kwargs)
        self._touched.after(result, shown)
        return result


def is_innermost(run: Run) -> bool:
    """Whether what sees the calls of a region is that of the region that the compiler is in, not in one inside it."""
    return _traced.open[-1]._run is run


def contexts_of(region: InGraph | None) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The modes under which the compiler runs a region forward and again, to mark what it saves.

    Under a function transform nothing can be marked: there the region is left out of it, as in Python.
    """
    if region is not None and (private.functorch_active() or not private.hooks_allowed()):
        region.plain = True
        region.region.tell_plain()
        torch_compiler.begin_anew("a region under a function transform")
    forward = Forward(region, None if region is None or region.region.options.policy is None else region.run())
    return forward, forward.replay
