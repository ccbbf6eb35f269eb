"""``trace``: the public way to record a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain

import torch
from torch import nn

from lowtide.errors import InvalidInputError, StepError
from lowtide.records import Phase, StepTrace
from lowtide.trace._counting import Counting
from lowtide.trace._execution import real_execution
from lowtide.trace._fake_trace import record_fake_step
from lowtide.trace._keep import away, beside, kept_by, saved_away
from lowtide.trace._recorder import Recorder, no_collection
from lowtide.trace._training_state import TrainingState


def trace(
    model: nn.Module,
    step: Callable[[], object],
    *,
    offload: bool = False,
    fake: bool = False,
    device: str | torch.device | None = None,
    gpu: str | None = None,
) -> StepTrace:
    """Record one un-checkpointed step of a model.

    The step runs twice: once to settle (optimizers make their state in their first step), once recorded.
    Parameters, buffers, gradients, optimizer state and random state are put back afterwards.

    Under fake tensors (``fake=True``) nothing is computed and nothing of the step's size is allocated. The tensors that the step can reach
    are exchanged for fake ones meanwhile, and back. Bytes are counted as the allocator of ``device`` would; what kernels on a GPU use while
    they run is not known.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.
        offload: keep what autograd saves in host memory, or in files for a model on the CPU, while the step is recorded, so
            that one that would not fit is traced all the same.
        fake: run the step under fake tensors.
        device: with ``fake``, what to trace for: ``"cpu"`` or ``"cuda"``, which need not be here. The model's own device if not given.
        gpu: with ``fake`` for ``"cuda"``, whose data sheet gives the times of the ops: ``"h100"``, ``"a100-80gb"``, ``"l4"``, … On the
            CPU each distinct op is run once and measured.

    Returns:
        The trace, with times in seconds and sizes in bytes.

    Raises:
        StepError: the step never calls backward; or it asks for a value while it is traced with fake tensors (``.item()``, ``if tensor:``,
            shapes that depend on data), or makes sparse tensors meanwhile.
        InvalidInputError: a device or GPU that there is no model of, or one without ``fake``.
        Exception: whatever the step raises.
    """
    if fake:
        with no_collection(), _sparse_refused():
            return _with_backward(record_fake_step(model, step, device_of(model), device, gpu))
    if device is not None or gpu is not None:
        raise InvalidInputError(
            "a device or GPU to trace for was given for a real step, which runs where its model is: add fake=True (--fake)"
        )
    with no_collection():
        return _recorded_as_it_was(model, step, offload)


@contextmanager
def _sparse_refused() -> Iterator[None]:
    """Fake tensors have no sparse kin that says how many elements it has."""
    try:
        yield
    except NotImplementedError as error:
        if "Sparse" not in str(error):
            raise
        raise StepError("the step makes sparse tensors, which fake ones cannot stand for: trace a real step, without fake=True") from error


def _recorded_as_it_was(model: nn.Module, step: Callable[[], object], offload: bool) -> StepTrace:
    # The state is gone when the garbage collector, which would look at all of its parts, comes back.
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
    keep = kept_by(away) if offload else beside
    return _with_backward(Recorder(model, Counting.on(device), real_execution(device), keep).record(step))


def _with_backward(recorded: StepTrace) -> StepTrace:
    if not any(op.phase is Phase.BACKWARD for op in recorded.ops):
        raise StepError("the step never called backward: a step runs forward and backward, such as loss_fn(model(x), y).backward()")
    return recorded


def device_of(model: nn.Module) -> torch.device:
    """The device whose memory counts: the first accelerator that holds a parameter or buffer, else the CPU."""
    tensors = chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))
