"""Runs of a step from one state, in whatever way, with everything that they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lowtide.errors import InvalidInputError, StepError
from lowtide.trace import TrainingState, find_optimizers
from lowtide.verify._observe import observe

Context = Callable[[], AbstractContextManager[object]]
"""Makes the context in which a step is run in some way."""
Observed = dict[str, torch.Tensor]
"""What a step computed, by name, on the host."""


def snapshot(model: nn.Module, step: Callable[[], object]) -> TrainingState:
    """Where every run starts: what the step can reach, with the data that it draws.

    Raises:
        InvalidInputError: a parameter gets its shape and values only from the first forward, so that there is nothing to start from.
    """
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise InvalidInputError(f"runs start from the same parameters, and {lazy!r} has no values yet: run the model once before")
    return TrainingState(model, step, iterators=True)


class Runs:
    """A step and where each run of it starts.

    Args:
        model: what the step trains.
        step: the step.
        state: it is put back before and after each run.
    """

    def __init__(self, model: nn.Module, step: Callable[[], object], state: TrainingState) -> None:
        self.model, self.step, self.state = model, step, state
        self._optimizers = find_optimizers(model)

    def once(self, way: Context) -> Observed:
        """What one step computes in some way."""
        [seen] = self.several(way, 1)
        return seen

    def several(self, way: Context, steps: int) -> Iterator[Observed]:
        """What each of several steps in a row computes; to be read to its end."""
        self.state.restore()
        try:
            with way():
                for number in range(1, steps + 1):
                    yield self._observed(number)
        finally:
            self.state.restore()

    def _observed(self, number: int) -> Observed:
        try:
            return observe(self.model, self.step, self._optimizers)
        except StopIteration as error:  # which would end this generator instead of the run
            raise StepError(f"the data that the step draws from ended in step {number} of a run: ask for fewer steps") from error
