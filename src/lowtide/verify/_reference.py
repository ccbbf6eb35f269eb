"""What the plain step computes, to hold other ways of running it against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import nn

from lowtide.engine._values import hash_of
from lowtide.trace import TrainingState
from lowtide.verify._difference import LENIENCE, Difference, distance, worst_first
from lowtide.verify._result import Verification, summary_of
from lowtide.verify._runs import Context, Observed, Runs

_EXTRA_RUNS = 3
"""More plain runs where two of them differ, to see how far."""


class Reference:
    """What the plain step computes, run at least twice from one state.

    Args:
        model: what the step trains.
        step: the step.
        state: where each run starts; it is put back at the end.
        steps: how many training steps a run has. Of those between the first and the last, what they return is
            kept, and hashes of all else.
        plain: the context in which the step is plain; none is needed where no plan is in force.
        agree: says whether a question that is answered here holds in any of the processes that verify together.

    Attributes:
        runs: of the step, in any way.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[], object],
        state: TrainingState,
        *,
        steps: int = 1,
        plain: Context = nullcontext,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Run the plain steps."""
        self.runs, self._steps = Runs(model, step, state), steps
        self._plain = list(self._observed(plain))
        self._spreads: dict[tuple[int, str], float] = self.distances(plain)
        if agree(not self.repeatable):
            for _ in range(_EXTRA_RUNS):
                again = self.distances(plain)
                self._spreads = {key: max(self._spreads.get(key, 0.0), far) for key, far in again.items()}

    @property
    def repeatable(self) -> bool:
        """Whether the runs were the same bit for bit."""
        return not any(self._spreads.values())

    @property
    def unsteady(self) -> tuple[Difference, ...]:
        """Where the plain step differs from itself."""
        return worst_first([Difference(name, i + 1, far, 0.0) for (i, name), far in self._spreads.items() if far])

    @property
    def first(self) -> Observed:
        """What the plain step computed, the first time."""
        return self._plain[0]

    def compare(self, way: Context = nullcontext) -> Verification:
        """Run the step in another way, from the same state, and compare.

        Args:
            way: the context that makes it so; none is needed where a plan is in force already.

        Raises:
            Exception: whatever the step raises.
        """
        found = self.distances(way)
        different = self._beyond(found)
        gradients = sum(name.startswith("gradient of ") for i, name in found if i == 0)
        names = tuple(dict.fromkeys(d.name for d in different))
        summary = summary_of(different, len(found), gradients, self._steps, repeatable=self.repeatable)
        worst = different[0] if different else None
        return Verification(not different, self.repeatable, len(found), gradients, names, summary, worst=worst, steps=self._steps)

    def _beyond(self, found: dict[tuple[int, str], float]) -> tuple[Difference, ...]:
        """What is further from the plain step than that from itself."""
        spreads = {key: LENIENCE * self._spreads.get(key, 0.0) for key in found}
        return worst_first([Difference(key[1], key[0] + 1, far, spreads[key]) for key, far in found.items() if far > spreads[key]])

    def distances(self, way: Context) -> dict[tuple[int, str], float]:
        """Run the step in some way; by step and name, how far each tensor is from the first plain run."""
        found: dict[tuple[int, str], float] = {}
        for i, seen in enumerate(self._observed(way)):
            names = self._plain[i].keys() | seen.keys()
            found.update({(i, name): distance(self._plain[i].get(name), seen.get(name)) for name in names})
        return found

    def _observed(self, way: Context) -> Iterator[Observed]:
        return (self._kept(i, seen) for i, seen in enumerate(self.runs.several(way, self._steps)))

    def _kept(self, i: int, seen: Observed) -> Observed:
        """Hashes, of the steps between the first and the last: host memory for two models, not for as many as there are steps."""
        if i in (0, self._steps - 1):
            return seen
        return {name: tensor if name.startswith(("loss", "result ")) else _hashed(tensor) for name, tensor in seen.items()}


def _hashed(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: like two random states, two hashes are equal or not comparable."""
    return torch.tensor(list((hash_of(tensor.to_dense()) or 0).to_bytes(4, "big")), dtype=torch.uint8)
