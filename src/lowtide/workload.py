"""What lowtide is pointed at: a model and a step that trains it. Names torch for type checkers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload:
    """A model with the step that trains it; what a target of ``lowtide fit`` returns.

    Attributes:
        model: whose module calls may be replayed.
        step: called without arguments, runs forward and backward, and the optimizer's update if it likes.
            Called again from the same random state, parameters and buffers, it has to do the same again.
        optimizer: the one that ``step`` uses, if any; its state is put back after a fit.
        tokens_per_step: tokens that one step trains on, to report tokens per second.
        name: what reports call it.
    """

    model: nn.Module
    step: Callable[[], object]
    optimizer: Optimizer | None = None
    tokens_per_step: int | None = None
    name: str = ""
