"""Finding objects through the garbage collector: tensors and optimizers, which nobody keeps a list of."""

from __future__ import annotations

import gc
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

T = TypeVar("T")


def instances(kind: type[T]) -> list[T]:
    """Every object of a type that the collector knows."""
    everything = gc.get_objects()
    # By type, and types first: isinstance may run code of lazy objects, and there are a thousand objects to a type.
    wanted = {found for found in set(map(type, everything)) if issubclass(found, kind)}
    return [candidate for candidate in everything if type(candidate) in wanted]


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that a Python object stands for."""
    return instances(torch.Tensor)


def find_optimizers(model: nn.Module) -> list[Optimizer]:
    """The optimizers alive in this process that update a parameter of ``model``."""
    owned = {id(parameter) for parameter in model.parameters()}
    found = [optimizer for optimizer in instances(Optimizer) if hasattr(optimizer, "param_groups")]
    return [optimizer for optimizer in found if any(id(p) in owned for group in optimizer.param_groups for p in group["params"])]
