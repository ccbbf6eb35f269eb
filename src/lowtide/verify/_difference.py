"""How far two tensors are apart, and which of many matters most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.verify._observe import same_bits

# A few repetitions are a poor sample of how far a step that is not repeatable strays from itself.
LENIENCE = 10


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that two runs of a step disagree on.

    Attributes:
        name: ``loss``, ``output 0``, ``gradient of blocks.0.weight``, ``buffer norm.running_mean``, ``random state 0``, …
        step: in which training step, from 1.
        distance: the largest difference between two elements over the largest element; infinite where that has no meaning: another
            shape or dtype, a random state, a tensor that only one of the runs has or of which only a hash was kept.
        allowed: how large it may be, for the plain step differs from itself; 0 where ops are deterministic.
        region: of the regions that ran, the one that the tensor belongs to; empty if none.
    """

    name: str
    step: int
    distance: float
    allowed: float
    region: str = ""

    @property
    def text(self) -> str:
        """The difference in a few words."""
        much = "not comparable" if self.distance == float("inf") else f"relative difference {self.distance:.2g}"
        allowed = f", {self.allowed:.2g} allowed" if self.allowed else ""
        return f"{self.name}{f' in step {self.step}' if self.step > 1 else ''} ({much}{allowed})"


def distance(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """0 for equal bits; else the largest difference over the largest value, infinite where it has no meaning."""
    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return float("inf")
    if same_bits(first, second):
        return 0.0
    if first.dtype == torch.uint8:  # a random state: near is no nearer than far
        return float("inf")
    return _relative(first, second) or float("inf")


def _relative(first: torch.Tensor, second: torch.Tensor) -> float:
    a, b = first.to_dense().to(torch.complex128), second.to_dense().to(torch.complex128)
    found = float((a - b).abs().max() / a.abs().max().clamp_min(1e-300))
    return found if found > 0 else 0.0


def distance_across(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    """The same for tensors whose dtypes may differ, as under another precision."""
    if first is None or second is None or first.shape != second.shape or torch.uint8 in (first.dtype, second.dtype):
        return 0.0 if first is second else float("inf")
    return 0.0 if first.numel() == 0 else _relative(first, second)


def region_of(name: str, regions: tuple[str, ...]) -> str:
    """The innermost region whose path is that of a module around what a name names; empty if there is none."""
    path = name.rpartition(" ")[2]
    around = [region for region in regions if any(path.startswith(f"{end}.") for end in region.split(" … "))]
    return max(around, key=len, default="")


def worst_first(differences: list[Difference]) -> tuple[Difference, ...]:
    """By step, and in it by size: what differs in the first step is the cause of what differs after it."""
    return tuple(sorted(differences, key=lambda d: (d.step, -d.distance, d.name)))
