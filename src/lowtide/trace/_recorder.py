"""One step, op by op: a dispatch mode that notes what ran, where, for how long, and on which storages."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide._torch_private import in_backward
from lowtide.errors import StepError
from lowtide.policy import fingerprint
from lowtide.records import Category, Op, Phase, StepTrace
from lowtide.trace._accumulation import Accumulation
from lowtide.trace._calls import CallTable
from lowtide.trace._saved import SavedTable
from lowtide.trace._source import source_line
from lowtide.trace._storages import StorageTable
from lowtide.trace._workspace import workspace_for


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs while it is active. One recorder serves one step.

    Args:
        model: the model that the step trains.
        optimizers: those that update it.
        device: the device whose bytes are counted.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], device: torch.device) -> None:
        """Prepare to record a step."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._optimizers, self._device = model, optimizers, device
        self._ops: list[Op] = []
        # Storages that each op returned; None for one that is recorded as done in place, though it was not.
        self._births: list[tuple[int, ...] | None] = []
        self._paused = self._in_optimizer = False
        self._storages = StorageTable(device, self._clock)
        self._calls = CallTable(self._storages, self._clock)
        self._saved = SavedTable(self._storages, self._clock, lambda: self._calls.current, self._pause)
        self._workspace = workspace_for(device)
        self._accumulation = Accumulation()
        self._gradients: list[torch.utils.hooks.RemovableHandle] = []

    def _clock(self) -> int:
        return len(self._ops)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def record(self, step: Callable[[], object]) -> StepTrace:
        """Run ``step`` once and return its trace.

        Raises:
            Exception: whatever the step raises.
        """
        self._enter_residents()
        with ExitStack() as stack:
            stack.callback(self._storages.close)
            stack.callback(self._calls.unwatch)
            self._calls.watch(self._model)
            self._watch_phases(stack)
            stack.enter_context(self._workspace)
            stack.enter_context(self._saved.hooks())
            with self:
                step()
            self._mark_optimizer_state()
            storages, saved, calls = self._storages.records(), self._saved.records(), self._calls.records()
        return StepTrace(self._with_workspaces(), storages, saved, calls, fingerprint(self._model), str(self._device))

    def _enter_residents(self) -> None:
        # Reading .grad makes the Python object by which a gradient that only autograd ever touched is found as live.
        gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        self._storages.remember_resident(live_tensors())
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            self._storages.index(tensor, Category.PARAMETER)
        for gradient in gradients:
            self._storages.index(gradient, Category.GRADIENT)
        self._mark_optimizer_state()

    def _mark_optimizer_state(self) -> None:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in tree_leaves(state):
                    if isinstance(value, torch.Tensor):
                        self._storages.mark(value, Category.OPTIMIZER)

    def _watch_phases(self, stack: ExitStack) -> None:
        for parameter in self._model.parameters():
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

    def _phase(self) -> Phase:
        if in_backward():
            return Phase.BACKWARD
        # Optimizers update without recording gradients; a closure that they call records them.
        return Phase.OPTIMIZER if self._in_optimizer and not torch.is_grad_enabled() else Phase.FORWARD

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run one op and note it."""
        kwargs = kwargs or {}
        if self._paused or func.namespace == "profiler":
            return func(*args, **kwargs)
        phase = self._phase()
        inside = Category.ACTIVATION if phase is Phase.FORWARD else Category.TEMPORARY
        reads = self._rows_of((args, kwargs), inside)
        writes = self._rows_of(_written(func, args, kwargs), inside)
        in_place = self._accumulation.is_in_place(func, args)
        out, seconds = self._timed(func, args, kwargs)
        if in_place:
            self._storages.move(args[0], out)
        self._births.append(None if in_place else self._rows_of(out, inside))
        random = torch.Tag.nondeterministic_seeded in func.tags
        source = source_line() if phase is Phase.FORWARD else ""
        self._ops.append(Op(str(func), phase, self._calls.current, source, seconds, 0, random, reads, writes))
        return out

    def _timed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        self._synchronize()
        with self._workspace.around():
            start = time.perf_counter()
            out = func(*args, **kwargs)
            self._synchronize()
            return out, time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _rows_of(self, tree: Any, category: Category) -> tuple[int, ...]:
        indices = (self._storages.index(leaf, category) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
        return tuple(dict.fromkeys(index for index in indices if index is not None))

    def _with_workspaces(self) -> tuple[Op, ...]:
        peaks = self._workspace.peaks()
        if len(peaks) != len(self._ops):
            raise StepError(f"{len(self._ops)} ops ran but the profiler saw {len(peaks)}: a step that is traced must not run a profiler")
        used = (self._bytes_used(index, peak) for index, peak in enumerate(peaks))
        return tuple(replace(op, workspace_bytes=workspace) for op, workspace in zip(self._ops, used, strict=True))

    def _bytes_used(self, op: int, peak_bytes: int) -> int:
        """Of what was allocated at most while an op ran, what it did not return."""
        births = self._births[op]
        return 0 if births is None else max(0, peak_bytes - self._storages.bytes_born_at(op, births))


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that a Python object stands for."""
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return written
