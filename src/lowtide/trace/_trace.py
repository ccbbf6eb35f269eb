"""``trace``: the public way to record a step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lowtide.errors import StepError
from lowtide.records import Phase, StepTrace
from lowtide.trace._recorder import Recorder
from lowtide.trace._training_state import TrainingState, find_optimizers


def trace(model: nn.Module, step: Callable[[], object]) -> StepTrace:
    """Record one un-checkpointed step of a model.

    The step runs twice: once to settle (optimizers make their state in their first step), once recorded.
    Parameters, buffers, gradients, optimizer state and random state are put back afterwards.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.

    Returns:
        The trace, with times in seconds and sizes in bytes.

    Raises:
        StepError: the step never calls backward.
        Exception: whatever the step raises.
    """
    state = TrainingState(model)
    try:
        step()
        return record_step(model, step)
    finally:
        state.restore()


def record_step(model: nn.Module, step: Callable[[], object]) -> StepTrace:
    """Run a step once and record it; its effects stay.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.

    Returns:
        The trace.

    Raises:
        StepError: the step never calls backward.
        Exception: whatever the step raises.
    """
    recorded = Recorder(model, find_optimizers(model), device_of(model)).record(step)
    if not any(op.phase is Phase.BACKWARD for op in recorded.ops):
        raise StepError("the step never called backward: a step runs forward and backward, such as loss_fn(model(x), y).backward()")
    return recorded


def device_of(model: nn.Module) -> torch.device:
    """The device whose memory counts: the first accelerator that holds a parameter or buffer, else the CPU."""
    devices = [tensor.device for tensor in [*model.parameters(), *model.buffers()]]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
