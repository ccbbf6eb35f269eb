"""Recording a step under fake tensors, for the device at hand or for one that is not here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide import _torch_compiler as torch_compiler
from lowtide.errors import InvalidInputError
from lowtide.records import StepTrace
from lowtide.trace._costs import Costs, MeasuredCosts, RooflineCosts
from lowtide.trace._counting import Counting
from lowtide.trace._fake import FakeWorld
from lowtide.trace._fake_execution import FakeExecution
from lowtide.trace._gpus import gpu_named
from lowtide.trace._keep import shape_only
from lowtide.trace._objects import find_optimizers
from lowtide.trace._recorder import Recorder
from lowtide.trace._values import told_to_libraries

MEASURED_BY_OP = "measured once per op"
_DEFAULT_GPU = "h100-80gb"


def record_fake_step(
    model: nn.Module, step: Callable[[], object], home: torch.device, device: str | torch.device | None, gpu: str | None
) -> StepTrace:
    """Run a step twice under fake tensors, and record the second time. Nothing of it remains.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.
        home: where the model is.
        device: the device to trace for; ``None`` for the one where the model is, or CUDA when a GPU is named.
        gpu: whose cost model gives the times; ``None`` for the default one on CUDA.

    Raises:
        InvalidInputError: the device or GPU is none that can be traced for.
        StepError: the step asks for values, which nobody computes.
        Exception: whatever the step raises.
    """
    counting = _counting(home, device, gpu)
    costs, timing = _costs(counting.device, gpu)
    world = FakeWorld(counting, home)
    execution = FakeExecution(counting, world.stand_in, costs, world.values)
    with world.exchanged(model, step):
        _choose_as_on(counting.device, find_optimizers(model))
        with torch_compiler.off(), world.mode, told_to_libraries(world.values):
            with execution.unrecorded():
                step()
            execution.forget()
            recorder = Recorder(model, counting, execution, shape_only, world.stand_in)
            return recorder.record(step, timing)


def _counting(home: torch.device, device: str | torch.device | None, gpu: str | None) -> Counting:
    if device is None:
        device = home if gpu is None else "cuda"
    wanted = torch.device(device)
    if wanted.type not in ("cpu", "cuda"):
        raise InvalidInputError(f"a fake trace is for 'cpu' or 'cuda', found {str(wanted)!r}: give device='cpu' or device='cuda'")
    if gpu is not None and wanted.type != "cuda":
        raise InvalidInputError(f"the cost model of a GPU ({gpu}) was asked for on {str(wanted)!r}: give device='cuda', or no gpu")
    if wanted.type == "cuda":
        wanted = torch.device("cuda", wanted.index or 0)
    # Autograd asks the driver about the device of every node, fake or not: where there is none, the CPU stands in for the GPU.
    is_here = wanted.type == "cpu" or torch.cuda.is_available()
    return Counting(wanted, wanted if is_here else torch.device("cpu"))


def _costs(device: torch.device, gpu: str | None) -> tuple[Costs, str]:
    if device.type == "cpu":
        return MeasuredCosts(), MEASURED_BY_OP
    chosen = gpu_named(gpu or _DEFAULT_GPU)
    return RooflineCosts(chosen), chosen.name


def _choose_as_on(device: torch.device, optimizers: list[Optimizer]) -> None:
    """Have optimizers that choose by the type of their parameters choose as they would for real ones on CUDA."""
    for optimizer in optimizers if device.type == "cuda" else ():
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
