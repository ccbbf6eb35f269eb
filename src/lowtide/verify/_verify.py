"""Plain against planned, from the same state, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lowtide.errors import VerificationError
from lowtide.trace import TrainingState
from lowtide.verify._observe import observe, same_bits

# One repetition is a poor sample of how far a step that is not repeatable strays from itself.
_LENIENCE = 3


@dataclass(frozen=True, slots=True)
class Verification:
    """How a planned step compares with the plain one.

    Attributes:
        equal: everything compared is the same, to the last bit, or within the plain step's own difference
            from itself where it is not repeatable.
        repeatable: two plain runs from the same state were the same bit for bit.
        compared: number of tensors compared: loss, gradients, parameters, buffers, optimizer and random state.
        gradients: how many of them are gradients.
        different: names of the tensors that differ, the worst first.
        summary: the verdict in one sentence.
    """

    equal: bool
    repeatable: bool
    compared: int
    gradients: int
    different: tuple[str, ...]
    summary: str

    def raise_if_different(self) -> None:
        """Raise ``VerificationError`` unless the two steps were equal."""
        if not self.equal:
            raise VerificationError(self.summary)


class Reference:
    """What the plain step computes, twice from one state, to hold other ways of running it against.

    Args:
        model: what the step trains, with no plan in force.
        step: the step.
        state: where each run starts; it is put back at the end.
    """

    def __init__(self, model: nn.Module, step: Callable[[], object], state: TrainingState) -> None:
        """Run the plain step twice."""
        self._model, self._step, self._state = model, step, state
        self._plain = self._observed()
        again = self._observed()
        self._spreads = {name: _distance(self._plain.get(name), again.get(name)) for name in self._plain.keys() | again.keys()}

    @property
    def repeatable(self) -> bool:
        """Whether the two runs were the same bit for bit."""
        return not any(self._spreads.values())

    def compare(self) -> Verification:
        """Run the step as it is now, from the same state, and compare.

        Raises:
            Exception: whatever the step raises.
        """
        planned = self._observed()
        names = self._plain.keys() | planned.keys()
        distances = {name: _distance(self._plain.get(name), planned.get(name)) for name in names}
        different = [name for name in names if distances[name] > _LENIENCE * self._spreads.get(name, 0.0)]
        different.sort(key=lambda name: (-distances[name], name))
        gradients = sum(name.startswith("gradient of ") for name in names)
        summary = _summary(self.repeatable, different, len(names), gradients, distances)
        return Verification(not different, self.repeatable, len(names), gradients, tuple(different), summary)

    def _observed(self) -> dict[str, torch.Tensor]:
        self._state.restore()
        try:
            return observe(self._model, self._step)
        finally:
            self._state.restore()


def _distance(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """0 for equal bits; else the largest difference over the largest value, infinite where it has no meaning."""
    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return float("inf")
    if same_bits(first, second):
        return 0.0
    if first.dtype == torch.uint8:  # a random state: near is no nearer than far
        return float("inf")
    a, b = first.to_dense().to(torch.complex128), second.to_dense().to(torch.complex128)
    distance = float((a - b).abs().max() / a.abs().max().clamp_min(1e-300))
    return distance if distance > 0 else float("inf")


def _summary(repeatable: bool, different: list[str], compared: int, gradients: int, distances: dict[str, float]) -> str:
    what = f"{compared} tensors ({gradients} gradients)"
    if different:
        listed = f"{different[0]} (relative difference {distances[different[0]]:.2g})"
        others = f" and {len(different) - 1} more" if len(different) > 1 else ""
        verdict = f"the planned step differs from the plain one in {listed}{others}, of {what} compared"
        return verdict if repeatable else f"cannot be verified, for the plain step does not repeat itself: {verdict}"
    if repeatable:
        return f"equal to the last bit: {what}"
    return f"within the plain step's own difference from itself (it is not repeatable): {what}"
