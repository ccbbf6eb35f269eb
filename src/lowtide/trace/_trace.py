"""``trace``: the public way to record a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from lowtide.errors import StepError
from lowtide.records import Phase, StepTrace
from lowtide.trace._counting import Counting
from lowtide.trace._execution import real_execution
from lowtide.trace._keep import away, beside, saved_away
from lowtide.trace._objects import find_optimizers
from lowtide.trace._recorder import Recorder, no_collection
from lowtide.trace._training_state import TrainingState


def trace(model: nn.Module, step: Callable[[], object], *, offload: bool = False) -> StepTrace:
    """Record one un-checkpointed step of a model.

    The step runs twice: once to settle (optimizers make their state in their first step), once recorded.
    Parameters, buffers, gradients, optimizer state and random state are put back afterwards.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.
        offload: keep what autograd saves in host memory, or in files for a model on the CPU, while the step is recorded, so
            that one that would not fit is traced all the same.

    Returns:
        The trace, with times in seconds and sizes in bytes.

    Raises:
        StepError: the step never calls backward.
        Exception: whatever the step raises.
    """
    with no_collection():
        state = TrainingState(model)
        try:
            _settle(step, offload)
            return record_step(model, step, offload=offload)
        finally:
            state.restore()


def _settle(step: Callable[[], object], offload: bool) -> None:
    with saved_away() if offload else nullcontext():
        step()


def record_step(model: nn.Module, step: Callable[[], object], *, offload: bool = False) -> StepTrace:
    """Run a step once and record it; its effects stay.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.
        offload: as for ``trace``.

    Returns:
        The trace.

    Raises:
        StepError: the step never calls backward.
        Exception: whatever the step raises.
    """
    device = device_of(model)
    keep = away if offload else beside
    recorded = Recorder(model, find_optimizers(model), Counting.on(device), real_execution(device), keep).record(step)
    refuse_without_backward(recorded)
    return recorded


def refuse_without_backward(recorded: StepTrace) -> None:
    """Raise unless the step called backward.

    Raises:
        StepError: it did not.
    """
    if not any(op.phase is Phase.BACKWARD for op in recorded.ops):
        raise StepError("the step never called backward: a step runs forward and backward, such as loss_fn(model(x), y).backward()")


def device_of(model: nn.Module) -> torch.device:
    """The device whose memory counts: the first accelerator that holds a parameter or buffer, else the CPU."""
    devices = [tensor.device for tensor in [*model.parameters(), *model.buffers()]]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
