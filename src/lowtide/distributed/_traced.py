"""The same figures by another way: the model is built, traced under fake tensors, and the replays played through by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.distributed._architecture import Architecture
from lowtide.distributed._estimate import Estimate, estimate
from lowtide.distributed._replay import replays_of
from lowtide.distributed._setup import Setup
from lowtide.errors import InvalidInputError
from lowtide.plan import PlannedRegion, simulate
from lowtide.records import StepTrace


@dataclass(frozen=True, slots=True)
class Agreement:
    """An estimate beside a trace, for one rank without its optimizer.

    Attributes:
        estimate: by closed forms.
        estimated_bytes, traced_bytes: peaks of a forward and backward.
        at: the op at which the traced peak is.
    """

    estimate: Estimate
    estimated_bytes: float
    traced_bytes: int
    at: str

    @property
    def ratio(self) -> float:
        """Estimated over traced."""
        return self.estimated_bytes / self.traced_bytes

    @property
    def agrees(self) -> bool:
        """Within 3 %."""
        return abs(self.ratio - 1) <= 0.03


def trace_architecture(model: Architecture, setup: Setup) -> StepTrace:
    """Trace a micro-batch on one rank as on CUDA: forward and backward, gradients added to those that are there.

    Raises:
        InvalidInputError: the setup splits the model, which a trace of one rank cannot show.
    """
    from lowtide.distributed._model import decoder_step
    from lowtide.trace import trace

    mesh = setup.mesh
    if mesh.pp > 1 or mesh.tp > 1 or (setup.zero > 1 and mesh.dp > 1):
        raise InvalidInputError(
            f"a trace is of one rank that holds the whole model; found {mesh} with ZeRO-{setup.zero}: leave pp, tp and zero out"
        )
    decoder, step = decoder_step(model, setup)
    return trace(decoder, step, fake=True, device="cuda")


def agreement(traced: StepTrace, model: Architecture, setup: Setup, policy: str) -> Agreement:
    """Compare closed forms and trace under one policy.

    Args:
        traced: from ``trace_architecture`` of the same model and setup.
        model: as for ``estimate``.
        setup: as for ``estimate``.
        policy: as for ``estimate``.
    """
    found = estimate(model, setup, policy)
    rank = found.ranks[0]
    regions = regions_of(policy, model.layers)
    simulated = simulate(traced, regions)
    at = traced.ops[int(simulated.timeline.op[simulated.peak_moment])].name
    return Agreement(found, rank.peak_bytes - rank.optimizer_bytes, simulated.peak_bytes, at)


def regions_of(policy: str, layers: int) -> tuple[PlannedRegion, ...]:
    """A policy as regions of the traced decoder."""
    replays = replays_of(policy, layers)
    if replays.selective:
        return tuple(_region(f"blocks.{layer}.attention.core") for layer in range(layers))
    starts = range(0, replays.full, replays.group)
    return tuple(_region(*(f"blocks.{layer}" for layer in range(start, min(start + replays.group, layers)))) for start in starts)


def _region(*paths: str) -> PlannedRegion:
    return PlannedRegion(paths)
