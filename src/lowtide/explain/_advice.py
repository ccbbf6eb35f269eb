"""What would help most: each remedy played through on the trace, ranked by the bytes that it takes off the peak.

Replays are simulated on the step as it is. What lowtide does not do itself is simulated on a changed trace (see
``_what_if``), so its figures are estimates; ``Advice.how`` says what was assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from lowtide.explain._frontier import FrontierPoint, frontier
from lowtide.explain._peak import Peak, peak
from lowtide.explain._step import StepView, path_name
from lowtide.explain._what_if import first_use, in_chunks, in_micro_batches, offloaded, one_parameter_at_a_time
from lowtide.explain._where import PeakIn, described, logits_family, logits_seconds, peak_in
from lowtide.plan import PlannedRegion, simulate
from lowtide.records import Phase, StepTrace
from lowtide.units import format_bytes, format_seconds

CHUNKS = 8
LINK_BYTES_PER_S = 25e9
"""What a host link moves one way: PCIe 4 × 16 in practice."""
_WORTH_SHARE = 0.01
"""A remedy that takes less than this off the peak is not mentioned."""
_HELPS_SHARE = 0.05
"""Replaying is said not to help when the best plan takes less than this off the peak."""
_SMALLEST_OFFLOADED = 2**20


class Remedy(str, Enum):
    """What could be done."""

    REPLAY = "replay"
    CHUNKED_LOSS = "chunked loss"
    ATTENTION = "fused attention"
    OFFLOAD = "offload"
    MICRO_BATCHES = "gradient accumulation"
    OPTIMIZER = "optimizer, a parameter at a time"


@dataclass(frozen=True, slots=True)
class Advice:
    """One remedy with what it would do.

    Attributes:
        remedy: which.
        title: in a few words.
        saves_bytes: by how much the peak would fall.
        peak_bytes: the peak that is left.
        adds_s: time that a step would take longer.
        how: what to do, and what was assumed.
        regions: what to replay, for ``REPLAY``.
    """

    remedy: Remedy
    title: str
    saves_bytes: int
    peak_bytes: int
    adds_s: float
    how: str
    regions: tuple[PlannedRegion, ...] = ()


@dataclass(frozen=True, slots=True)
class AdviceReport:
    """All that would help, best first.

    Attributes:
        peak_bytes, step_s: of the step as it is.
        remedies: ranked by bytes saved, then by time.
        checkpointing_helps: whether replaying can take a noticeable part off the peak.
        verdict: that in a sentence.
    """

    peak_bytes: int
    step_s: float
    remedies: tuple[Advice, ...]
    checkpointing_helps: bool
    verdict: str


def advice(trace: StepTrace, *, points: tuple[FrontierPoint, ...] | None = None, time_limit_s: float = 10.0) -> AdviceReport:
    """Rank what would lower the peak.

    Args:
        trace: of the un-checkpointed step.
        points: of ``frontier``, where it was made already.
        time_limit_s: for making it.
    """
    adviser = _Adviser(trace, points or frontier(trace, time_limit_s=time_limit_s))
    worth = [a for a in adviser.remedies() if a.saves_bytes >= _WORTH_SHARE * adviser.peak.bytes]
    ranked = tuple(sorted(worth, key=lambda a: (-a.saves_bytes, a.adds_s)))
    return AdviceReport(adviser.peak.bytes, adviser.peak.step_s, ranked, adviser.checkpointing_helps, adviser.verdict())


class _Adviser:
    """One trace and the remedies for it."""

    def __init__(self, trace: StepTrace, points: tuple[FrontierPoint, ...]) -> None:
        self.view, self.points, self.peak = StepView(trace), points, peak(trace)

    @property
    def trace(self) -> StepTrace:
        return self.view.trace

    @property
    def checkpointing_helps(self) -> bool:
        return self.peak.bytes - self.points[0].peak_bytes >= _HELPS_SHARE * self.peak.bytes

    def verdict(self) -> str:
        best, share = self.points[0], 1 - self.points[0].peak_bytes / max(self.peak.bytes, 1)
        if self.checkpointing_helps:
            return (
                f"activation checkpointing helps: down to {format_bytes(best.peak_bytes)} of {format_bytes(self.peak.bytes)} "
                f"({share:.0%} less) for {format_seconds(best.replay_s)} of replay"
            )
        return (
            f"activation checkpointing will not help here: the best plan leaves {format_bytes(best.peak_bytes)} of "
            f"{format_bytes(self.peak.bytes)}. {_why_not(self.view, self.peak)}"
        )

    def remedies(self) -> Iterator[Advice]:
        yield from self._replays()
        yield from self._chunked_loss()
        yield from self._attention()
        yield from self._offload()
        yield from self._micro_batches()
        yield from self._optimizer()

    def _judged(self, remedy: Remedy, title: str, changed: StepTrace, adds_s: float, how: str) -> Iterator[Advice]:
        left = simulate(changed, None).peak_bytes
        yield Advice(remedy, title, self.peak.bytes - left, left, adds_s, how)

    def _replays(self) -> Iterator[Advice]:
        """The smallest peak, and of the plans in between the one that saves the most for its time."""
        plans = [p for p in self.points if p.regions]
        between = sorted(plans[1:], key=lambda p: -(self.peak.bytes - p.peak_bytes) / max(p.replay_s, 1e-12))
        for point in [*plans[:1], *between[:1]]:
            title = f"replay {_regions_named(point.regions)}"
            how = f"lowtide fit --budget {point.peak_bytes}"
            saves = self.peak.bytes - point.peak_bytes
            yield Advice(Remedy.REPLAY, title, saves, point.peak_bytes, point.replay_s, how, point.regions)

    def _chunked_loss(self) -> Iterator[Advice]:
        family = logits_family(self.view)
        if family:
            largest = max(int(self.view.bytes[s]) for s in family)
            how = (
                f"compute logits and loss for 1/{CHUNKS} of the tokens at a time, and again in backward: the {format_bytes(largest)} "
                "of logits, their log-probabilities and gradients are never whole (lowtide.checkpoint around head and loss of each chunk)"
            )
            changed = in_chunks(self.trace, family, CHUNKS)
            yield from self._judged(Remedy.CHUNKED_LOSS, f"loss in {CHUNKS} chunks", changed, logits_seconds(self.view), how)

    def _attention(self) -> Iterator[Advice]:
        weights = attention_weights(self.view)
        if weights:
            changed = in_chunks(self.trace, weights, 1_000_000)
            how = "torch.nn.functional.scaled_dot_product_attention with a fused backend: the matrix of attention weights is never made"
            yield from self._judged(Remedy.ATTENTION, "attention by a fused kernel", changed, 0.0, how)

    def _offload(self) -> Iterator[Advice]:
        if self.trace.device == "cpu":
            return
        idle = [s for s in self.view.slots_of_storage if self._can_go(s)]
        if idle:
            moved = self.view.bytes_of(idle)
            adds_s = max(2 * moved / LINK_BYTES_PER_S - self.peak.step_s, 0.0)
            how = f"{format_bytes(moved)} to the host and back, beside the computation, at {LINK_BYTES_PER_S / 1e9:.0f} GB/s each way"
            title = f"offload {len(idle)} saved tensors"
            yield from self._judged(Remedy.OFFLOAD, title, offloaded(self.trace, idle), adds_s, how)

    def _can_go(self, storage: int) -> bool:
        record = self.view.trace.storages[storage]
        waits = first_use(self.view, storage) - record.freed > 1
        return self.view.is_activation(storage) and record.bytes >= _SMALLEST_OFFLOADED and waits

    def _micro_batches(self) -> Iterator[Advice]:
        how = (
            "run half of the batch at a time and add the gradients up before the optimizer's step; the same arithmetic in smaller "
            "kernels (batch norm then sees half a batch)"
        )
        yield from self._judged(Remedy.MICRO_BATCHES, "two micro-batches", in_micro_batches(self.trace, 2), 0.0, how)

    def _optimizer(self) -> Iterator[Advice]:
        if self.peak.phase is Phase.OPTIMIZER:
            how = "foreach=False (or fused=True) in the optimizer's arguments: its temporaries are then those of one parameter"
            changed = one_parameter_at_a_time(self.trace)
            yield from self._judged(Remedy.OPTIMIZER, "update one parameter at a time", changed, 0.0, how)


def attention_weights(view: StepView) -> list[int]:
    """Score matrices, their softmax, dropout and gradients, of attention that is written out: softmax between two products."""
    found: dict[int, None] = {}
    for i, op in enumerate(view.trace.ops):
        if op.phase is Phase.FORWARD and op.name.startswith(("aten._softmax.", "aten._safe_softmax.")):
            found.update(dict.fromkeys(_matrix(view, i)))
    return list(found)


def _matrix(view: StepView, softmax: int) -> Iterator[int]:
    """Storages as large as the weights, made from the product before the softmax to the one after, and in the backward of these ops."""
    made = view.born_at.get(softmax, [])
    ops, call = view.trace.ops, view.trace.ops[softmax].call
    products = [i for i in range(max(softmax - 12, 0), min(softmax + 13, len(ops))) if _is_product(ops[i].name) and ops[i].call == call]
    before, after = [i for i in products if i < softmax], [i for i in products if i > softmax]
    if not (made and before and after):
        return
    size, inside = view.trace.storages[made[0]].bytes, range(before[-1], after[0] + 1)
    for op in (*inside[:-1], *(back for i in inside for back in view.backward_of.get(i, []))):
        yield from (s for s in view.born_at.get(op, []) if view.trace.storages[s].bytes == size)


def _is_product(name: str) -> bool:
    return name.startswith(("aten.bmm.", "aten.baddbmm.", "aten.matmul."))


def _regions_named(regions: tuple[PlannedRegion, ...]) -> str:
    names = [f"{path_name(r.paths[0])} … {path_name(r.paths[-1])}" if len(r.paths) > 1 else path_name(r.paths[0]) for r in regions]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, {names[1]}, … {names[-1]} ({len(names)} regions)"


_WHY_NOT = {
    PeakIn.OPTIMIZER: "The peak is in the optimizer's step, when activations are gone",
    PeakIn.LOGITS: "The peak is the loss: logits, their log-probabilities and gradients are all there at once",
    PeakIn.STATE: "Parameters, gradients and optimizer state fill it, and they are there however activations are kept",
    PeakIn.TEMPORARIES: "Temporaries fill it, which are there only while an op or two run",
    PeakIn.ACTIVATIONS: "What is alive then is in use, or comes back before it is",
}


def _why_not(view: StepView, at: Peak) -> str:
    return f"{_WHY_NOT[peak_in(view, at)]}: the peak is {described(at)}."
