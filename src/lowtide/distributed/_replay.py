"""How much replay: what a stage of a pipeline keeps, and what it computes again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowtide.distributed._activations import layer_input_bytes, layer_terms
from lowtide.distributed._architecture import Architecture
from lowtide.distributed._setup import Setup
from lowtide.errors import InvalidInputError

POLICIES = ("none", "selective", "full", "sqrt")


@dataclass(frozen=True, slots=True)
class Replays:
    """What becomes of the blocks of a stage.

    Attributes:
        kept: blocks that keep all they save.
        selective: blocks that replay attention's core alone.
        full: blocks that are replayed whole, from their input.
        group: how many of those are replayed together from one input.
    """

    kept: int = 0
    selective: int = 0
    full: int = 0
    group: int = 1

    @property
    def layers(self) -> int:
        """All blocks of the stage."""
        return self.kept + self.selective + self.full


def replays_of(policy: str, layers: int) -> Replays:
    """What a policy decides for a stage.

    Raises:
        InvalidInputError: there is no such policy.

    >>> replays_of("sqrt", 32)
    Replays(kept=0, selective=0, full=32, group=6)
    """
    if policy == "none":
        return Replays(kept=layers)
    if policy == "selective":
        return Replays(selective=layers)
    if policy == "full":
        return Replays(full=layers)
    if policy == "sqrt":
        return Replays(full=layers, group=max(1, math.ceil(math.sqrt(layers))))
    raise InvalidInputError(f"a policy is one of {', '.join(POLICIES)}; found {policy!r}")


class Layer:
    """Bytes and arithmetic of one block on one rank, for one micro-batch."""

    def __init__(self, model: Architecture, setup: Setup) -> None:
        """Count them once; every stage and every plan asks again."""
        terms = layer_terms(model, setup)
        self.saved_bytes = sum(term.bytes for term in terms)
        self.core_bytes = sum(term.bytes for term in terms if term.core)
        self.input_bytes = layer_input_bytes(model, setup)
        self.core_flops, self.forward_flops = _flops(model, setup)

    def kept_bytes(self, replays: Replays) -> float:
        """What a stage keeps between forward and backward."""
        kept = replays.kept * self.saved_bytes + replays.selective * (self.saved_bytes - self.core_bytes)
        return kept + math.ceil(replays.full / replays.group) * self.input_bytes

    def working_bytes(self, replays: Replays) -> float:
        """What is made again at once: a group's blocks, from the input that is kept already, or a core."""
        if replays.full:
            return min(replays.full, replays.group) * self.saved_bytes - self.input_bytes
        return self.core_bytes if replays.selective else 0.0

    def replay_flops(self, replays: Replays) -> float:
        """What a stage computes again."""
        return replays.full * self.forward_flops + replays.selective * self.core_flops


def _flops(model: Architecture, setup: Setup) -> tuple[float, float]:
    """Operations of attention's core, and of a forward in all: two a multiplication with a weight, and two for each entry of both
    products with the scores (Korthikanti et al. 2022, appendix A; the causal half is counted, as there)."""
    used = model.attention_matrices + model.experts_used * model.mlp_matrices + model.router_parameters
    core = 4.0 * setup.tokens * setup.sequence * model.attention_width / setup.mesh.tp
    return core, core + 2.0 * setup.tokens * used / setup.mesh.tp
