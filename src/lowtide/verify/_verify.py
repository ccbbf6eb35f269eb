"""Plain against planned, from the same state, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
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


def verify_step(
    model: nn.Module, step: Callable[[], object], without_plan: Callable[[], AbstractContextManager[object]], state: TrainingState
) -> Verification:
    """Compare a step under the installed plan with the plain step.

    Runs the plain step twice and the planned step once, each from ``state``; the state is put back at the end.

    Args:
        model: the model, with the plan installed.
        step: the step.
        without_plan: a context in which the plan does nothing.
        state: where each run starts.

    Returns:
        The comparison.
    """
    try:
        plain, again = (_observed(model, step, without_plan, state) for _ in range(2))
        state.restore()
        planned = observe(model, step)
    finally:
        state.restore()
    return _compare(plain, again, planned)


def _observed(
    model: nn.Module, step: Callable[[], object], context: Callable[[], AbstractContextManager[object]], state: TrainingState
) -> dict[str, torch.Tensor]:
    state.restore()
    with context():
        return observe(model, step)


def _compare(plain: dict[str, torch.Tensor], again: dict[str, torch.Tensor], planned: dict[str, torch.Tensor]) -> Verification:
    names = plain.keys() | planned.keys()
    repeatable = plain.keys() == again.keys() and all(same_bits(plain[name], again[name]) for name in plain)
    distances = {name: _distance(plain.get(name), planned.get(name)) for name in names}
    spreads = {name: _distance(plain.get(name), again.get(name)) for name in names}
    different = sorted((name for name in names if distances[name] > _LENIENCE * spreads[name]), key=lambda name: -distances[name])
    gradients = sum(name.startswith("gradient of ") for name in names)
    summary = _summary(repeatable, different, len(names), gradients, distances)
    return Verification(not different, repeatable, len(names), gradients, tuple(different), summary)


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
        return f"the planned step differs from the plain one in {listed}{others}, of {what} compared"
    if repeatable:
        return f"equal to the last bit: {what}"
    return f"within the plain step's own difference from itself (it is not repeatable): {what}"
