"""The memory of each rank, by closed forms, before there is a machine to run on.

Parameters, gradients and optimizer state are those of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (2020), section 5: of Ψ parameters on a rank, stage 1 splits the optimizer state over the ranks of data parallelism, stage 2 the
gradients too, stage 3 the parameters too. Activations are counted in ``_activations``, micro-batches in flight in ``_stages``.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.distributed._architecture import Architecture
from lowtide.distributed._replay import Layer, Replays, replays_of
from lowtide.distributed._setup import Setup
from lowtide.distributed._stages import Stage, stages


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank of one stage holds at its peak, in bytes.

    Attributes:
        stage: index of the stage.
        layers: its blocks.
        replays: what becomes of each.
        parameter_bytes, gradient_bytes, optimizer_bytes: as ``zero`` and ``tp`` split them.
        activation_bytes: kept for backward, of all micro-batches in flight.
        logits_bytes: of the last stage: the logits, and what the backward of loss and head makes of them.
        temporary_bytes: the most that exists for a moment beside them: blocks made again, gradients of activations, and with ``zero`` 2 and
            3 the parameters and gradients that are whole on every rank while a block runs.
        flops: of forward and backward of a micro-batch, replays included.
        replay_share: how much the replays add to them.
    """

    stage: int
    layers: int
    replays: Replays
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    logits_bytes: float
    temporary_bytes: float
    flops: float
    replay_share: float

    @property
    def peak_bytes(self) -> float:
        """All of it. Logits are gone before the first block's backward, so the larger of the two counts."""
        moment = max(self.logits_bytes, self.temporary_bytes)
        return self.state_bytes + self.activation_bytes + moment

    @property
    def state_bytes(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of every stage.

    Attributes:
        model: what is trained.
        setup: how.
        policy: how much is replayed: ``none``, ``selective``, ``full``, ``sqrt``, or ``plan`` where stages differ.
        ranks: one a stage; all ranks of a stage hold the same.
    """

    model: Architecture
    setup: Setup
    policy: str
    ranks: tuple[RankMemory, ...]

    @property
    def peak_bytes(self) -> float:
        """Of the stage that holds the most."""
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def slowdown(self) -> float:
        """Arithmetic of the slowest stage over what it would be without replays: 1.33 where all is replayed."""
        plain = max(rank.flops / (1 + rank.replay_share) for rank in self.ranks)
        return max(rank.flops for rank in self.ranks) / plain


def estimate(model: Architecture, setup: Setup, policy: str = "none") -> Estimate:
    """The memory of each stage under one policy.

    Args:
        model: from ``architecture``.
        setup: sequence, batch, mesh, ZeRO stage.
        policy: ``"none"``, ``"selective"`` (attention's core), ``"full"`` (each block), ``"sqrt"`` (groups of about their root).

    Raises:
        InvalidInputError: no such policy, or more stages than blocks.
    """
    counts = Counts(model, setup)
    found = tuple(counts.rank(stage, replays_of(policy, stage.layers)) for stage in stages(model, setup))
    return Estimate(model, setup, policy, found)


class Counts:
    """What all stages share; answers for one stage and one choice of replays."""

    def __init__(self, model: Architecture, setup: Setup) -> None:
        """Count the block once."""
        self.model, self.setup = model, setup
        self.layer = Layer(model, setup)

    def rank(self, stage: Stage, replays: Replays) -> RankMemory:
        """The memory of a rank of a stage."""
        layer = self.layer
        parameters, gradients, optimizer = self._states(stage)
        forward = stage.layers * layer.forward_flops + (self._head_flops() if stage.last else 0.0)
        return RankMemory(
            stage=stage.index,
            layers=stage.layers,
            replays=replays,
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            optimizer_bytes=optimizer,
            activation_bytes=stage.in_flight * layer.kept_bytes(replays) + (self._head_inputs() if stage.last else 0.0),
            logits_bytes=self._logits() if stage.last else 0.0,
            temporary_bytes=layer.working_bytes(replays) + self._flowing_gradients() + self._tied_gradient(stage) + self._gathered(stage),
            flops=3 * forward + layer.replay_flops(replays),
            replay_share=layer.replay_flops(replays) / (3 * forward),
        )

    def _states(self, stage: Stage) -> tuple[float, float, float]:
        setup = self.setup
        held, dp = stage.parameters / setup.mesh.tp, setup.mesh.dp
        return (
            held * setup.value_bytes / (dp if setup.zero >= 3 else 1),
            held * setup.gradient_bytes / (dp if setup.zero >= 2 else 1),
            held * setup.optimizer_bytes / (dp if setup.zero >= 1 else 1),
        )

    def _gathered(self, stage: Stage) -> float:
        """Whole parameters of the part that runs and of the one fetched ahead; whole gradients of the part that is being reduced."""
        setup = self.setup
        if setup.zero < 2 or setup.mesh.dp == 1:
            return 0.0
        parameters = 2 * setup.value_bytes if setup.zero == 3 else 0
        return stage.largest_layer / setup.mesh.tp * (parameters + setup.gradient_bytes)

    def _flowing_gradients(self) -> float:
        """Gradients in the widest place of a block's backward: of an op's result, of its input, and of the weight before it is added up."""
        model, setup = self.model, self.setup
        wide = max(model.experts_used * model.hidden, model.attention_width + 2 * model.kv_width)
        matrix = model.width * max(model.hidden, model.attention_width + 2 * model.kv_width)
        if setup.attention == "math":
            wide = max(wide, model.heads * setup.sequence)
        return setup.value_bytes * (setup.tokens * (model.width + 2 * wide / setup.mesh.tp) + matrix / setup.mesh.tp)

    def _tied_gradient(self, stage: Stage) -> float:
        """The head's gradient of a matrix that the embedding uses too waits for the embedding's, the last one of a backward."""
        shared = self.model.tied and stage.first and stage.last
        return self.model.vocabulary * self.model.width * self.setup.value_bytes / self.setup.mesh.tp if shared else 0.0

    def _head_inputs(self) -> float:
        """Inputs of the last norm and of the head."""
        parts = self.setup.mesh.tp if self.setup.sequence_parallel else 1
        return 2 * self.setup.tokens * self.model.width * self.setup.value_bytes / parts

    def _logits(self) -> float:
        """The logits, and the larger of two moments: that of the cross-entropy's backward, with the log-softmax, its gradient and that of
        its input in single precision; or that of the head's, with the gradients of the logits and of the weight."""
        setup, vocabulary = self.setup, self.model.vocabulary / self.setup.mesh.tp
        of_loss = setup.tokens * vocabulary * 3 * 4
        of_head = (setup.tokens + self.model.width) * vocabulary * setup.value_bytes
        return setup.tokens * vocabulary * setup.value_bytes + max(of_loss, of_head)

    def _head_flops(self) -> float:
        return 2.0 * self.setup.tokens * self.model.vocabulary * self.model.width / self.setup.mesh.tp
