"""One step, op by op: a dispatch mode that notes what ran, where, for how long, and on which storages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from lowtide import _torch_compiler as torch_compiler
from lowtide._torch_private import BareDispatchMode, graph_task_id
from lowtide._torch_tracing import unseen
from lowtide.engine import in_replay, transforms_allowed
from lowtide.policy import fingerprint
from lowtide.records import MEASURED, Category, Phase, StepTrace
from lowtide.trace import _native_parts as _native_parts  # what is compiled is given what it uses
from lowtide.trace._acceleration import native
from lowtide.trace._accumulation import Accumulation
from lowtide.trace._buckets import bucket_sizes, with_buckets
from lowtide.trace._calls import CallTable
from lowtide.trace._counting import Counting
from lowtide.trace._execution import CpuExecution, Execution
from lowtide.trace._functions import FunctionTable
from lowtide.trace._gathers import with_gathers
from lowtide.trace._keep import Keep
from lowtide.trace._objects import live_tensors_and_optimizers
from lowtide.trace._op_table import OpTable
from lowtide.trace._ops import facts_of, look_at, tensors_in
from lowtide.trace._saved import SavedTable
from lowtide.trace._source import source_line
from lowtide.trace._storages import StorageTable

# Members of enumerations take longer to look up than names.
_FORWARD, _REPLAY, _BACKWARD, _OPTIMIZER = Phase.FORWARD, Phase.REPLAY, Phase.BACKWARD, Phase.OPTIMIZER
_ACTIVATION, _TEMPORARY = Category.ACTIVATION, Category.TEMPORARY
_ADD = torch.ops.aten.add.Tensor


class Recorder(BareDispatchMode):
    """Records what runs while it is active. One recorder serves one step.

    Args:
        model: the model that the step trains.
        counting: whose bytes are counted, and how.
        execution: runs the ops.
        keep: how saved tensors are kept meanwhile.
        stand_in: what is recorded in a tensor's place.
    """

    def __init__(
        self,
        model: nn.Module,
        counting: Counting,
        execution: Execution,
        keep: Keep,
        stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Prepare to record a step."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._counting, self._execution = model, counting, execution
        self._parameters = list(model.parameters())
        self._optimizers: list[Optimizer] = []
        self._paused = self._in_optimizer = False
        self._ops, self._stand_in = OpTable(), stand_in
        clock = self._ops.clock
        # None of these refers to the recorder, which would then, with all its rows, be left to the garbage collector.
        self._storages = StorageTable(counting, self._ops.rows, None if stand_in is None else self._stood_in)
        self._calls = CallTable(self._storages, clock)
        bare = unseen()
        aside = self._pause_without_gradients if stand_in else lambda: bare
        self._functions = FunctionTable(self._storages, clock, self._calls.current)
        self._saved = SavedTable(self._storages, self._ops.rows, self._calls.current, self._functions, aside, keep)
        self._accumulation = Accumulation()
        self._compiled: Any = None if self._storages.compiled is None else self._compiled_by(native)

    def _compiled_by(self, native: Any) -> Any:
        """What does the same as ``__torch_dispatch__``, compiled."""
        storages, ops, calls, execution = self._storages, self._ops, self._calls, self._execution
        timed = execution if isinstance(execution, CpuExecution) else None
        return native.Recording(
            storages=storages.compiled,
            ops=ops.rows,
            makers=ops.maker_of_node,
            kinds=timed and timed.known,
            kinds_of_ops=timed and timed.kinds,
            peaks=timed and timed.peaks_seen,
            running=storages.running,
            refills=storages.refills,
            note_emptied=storages.note_emptied,
            is_replay=calls.in_replayed,
            is_in_place=self._accumulation.is_in_place,
            counts=self._accumulation.counts,
            move=storages.move,
            run=execution.run,
        )

    def _stood_in(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._stand_in is not None
        with self._pause():
            return self._stand_in(tensor)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def _pause_without_gradients(self) -> Iterator[None]:
        # Fake tensors are made by a dispatch mode, so that this one can only look away.
        with self._pause(), torch.no_grad():
            yield

    def record(self, step: Callable[[], object], timing: str = MEASURED) -> StepTrace:
        """Run ``step`` once and return its trace.

        Args:
            step: what to record.
            timing: where the execution's times come from.

        Raises:
            Exception: whatever the step raises.
        """
        self._enter_residents()
        with ExitStack() as stack:
            stack.enter_context(torch_compiler.off())  # what is compiled shows no ops
            stack.enter_context(no_collection())
            stack.callback(self._storages.close)
            stack.callback(self._calls.unwatch)
            self._calls.watch(self._model)
            self._watch_phases(stack)
            if self._compiled is not None:
                self.__torch_dispatch__ = MethodType(self._compiled.dispatch, self)  # type: ignore[method-assign]
                stack.callback(vars(self).pop, "__torch_dispatch__")  # it refers to the recorder
            stack.enter_context(self._saved.hooks())
            stack.enter_context(transforms_allowed())
            with self, self._functions:
                step()
            self._mark_optimizer_state()
            saved, calls, functions = self._saved.records(), self._calls.records(), self._functions.records()
        for op, sizes in enumerate(self._execution.returned()):
            self._storages.correct(op, self._ops.births(op), sizes)
        storages = self._storages.records()
        ops = self._ops.records(self._execution.seconds(), self._execution.peaks(), self._storages.bytes_born_at)
        about = (fingerprint(self._model), str(self._counting.device), torch.__version__, self._execution.is_fake, timing)
        found = StepTrace(ops, storages, saved, calls, *about, functions=functions)
        return with_buckets(with_gathers(found, self._storages.refills), bucket_sizes(self._model))

    def _enter_residents(self) -> None:
        # Reading .grad makes the Python object by which a gradient that only autograd ever touched is found as live.
        gradients = [gradient for parameter in self._parameters if (gradient := parameter.grad) is not None]
        tensors, self._optimizers = live_tensors_and_optimizers(self._model)
        self._storages.remember_resident(tensors)
        del tensors
        self._storages.rows_of([*self._parameters, *self._model.buffers()], Category.PARAMETER)
        self._storages.rows_of(gradients, Category.GRADIENT)
        self._mark_optimizer_state()

    def _mark_optimizer_state(self) -> None:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in tree_leaves(state):
                    if isinstance(value, torch.Tensor):
                        self._storages.mark(value, Category.OPTIMIZER)

    def _watch_phases(self, stack: ExitStack) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        stack.callback(register_optimizer_step_pre_hook(lambda *_: self._optimizer_running(True)).remove)
        stack.callback(register_optimizer_step_post_hook(lambda *_: self._optimizer_running(False)).remove)

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._storages.mark(parameter.grad, Category.GRADIENT)

    def _optimizer_running(self, running: bool) -> None:
        self._in_optimizer = running
        if self._compiled is not None:
            self._compiled.in_optimizer = running

    def _phase(self) -> Phase:
        if graph_task_id() != -1:
            return _REPLAY if in_replay() or self._calls.in_replayed() else _BACKWARD
        # Optimizers update without recording gradients; a closure that they call records them.
        return _OPTIMIZER if self._in_optimizer and not torch.is_grad_enabled() else _FORWARD

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one op and note it."""
        kwargs = kwargs or {}
        facts = facts_of(func)
        if self._paused or not facts.recorded:
            return func(*args, **kwargs)
        phase = self._phase()
        runs_forward = phase is _FORWARD or phase is _REPLAY
        inside = _ACTIVATION if runs_forward else _TEMPORARY
        read: list[torch.Tensor] = []
        # Some kernels look whether gradients are recorded, and return more where they are.
        like: list[Any] = [facts, torch.is_grad_enabled()]
        if facts.alike:
            read = tensors_in(args)
        else:
            look_at(args, read, like)
            if kwargs:
                look_at(kwargs.items(), read, like)
        storages = self._storages
        if storages.refills:
            storages.note_emptied()
        rows_of = storages.rows_of
        reads = rows_of(read, inside)
        writes = rows_of(facts.written_tensors(args, kwargs), inside) if facts.written else ()
        in_place = func is _ADD and self._accumulation.is_in_place(args)
        del read
        out = self._execution.run(facts, args, kwargs, tuple(like))
        if in_place:
            storages.move(args[0], out)
            births = None
        else:
            births = rows_of((out,) if isinstance(out, torch.Tensor) else tensors_in((out,)), inside)
        source = source_line() if runs_forward else ""
        self._ops.add(facts, phase, self._calls.current(), source, reads, writes, births)
        return out


@contextmanager
def no_collection() -> Iterator[None]:
    """Without the cyclic garbage collector: a trace makes many objects, and what it collects when is no matter of the step."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
