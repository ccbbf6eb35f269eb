"""Memory hardly falls although regions run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from lowtide.explain import Cause, FrontierPoint, Peak, PeakIn, StepView, advice, described, peak_in, region_replays
from lowtide.records import Category, Phase, StepTrace
from lowtide.units import format_bytes
from lowtide.verify.doctor._examination import Examination
from lowtide.verify.doctor._finding import Finding, Severity

_HARDLY = 0.1
"""A peak that falls by less than this share has hardly fallen."""
_LITTLE_FREED = 0.34
"""Regions that free less than this share of what is saved in them cost about what they save."""
_HALF_FREED = 0.5
"""The same for fused attention: of what it saves, its result can go."""
_EVERYTHING = 0.9
_SHARD = (
    "fewer or smaller parameters, an optimizer with less state, or a share of both on each of several devices "
    "(torch.distributed.fsdp.fully_shard): no replay moves them"
)
_COMMUNICATION = 0.3
_FUSED = re.compile(
    r"(flash|efficient|cudnn|fused)\w*_attention|attention_\w*(flash|efficient|fused)|scaled_dot_product_(flash|efficient|cudnn)"
)
_OF_INPUTS = (Cause.REGION_INPUT, Cause.INPUT_HELD, Cause.NOTHING_SAVED)


def find(exam: Examination) -> Iterator[Finding]:
    """Why the peak is about where it is without checkpointing."""
    if exam.plain is None or exam.as_it_is is None or exam.plain_peak is None or exam.peak is None or not exam.paths:
        return
    fall = 1 - exam.peak.bytes / exam.plain_peak.bytes
    if fall >= _HARDLY:
        return
    seen = f"peak {format_bytes(exam.peak.bytes)} with checkpointing, {format_bytes(exam.plain_peak.bytes)} without"
    sent = _communicated_bytes(exam.as_it_is, exam.peak)
    if sent >= _COMMUNICATION * exam.peak.bytes:
        yield _communication(sent, seen)
    elif peak_in(StepView(exam.plain), exam.plain_peak) is PeakIn.ACTIVATIONS:
        yield from _regions(exam, exam.plain, seen)
    else:
        yield from _elsewhere(exam, exam.plain, exam.plain_peak, seen)


def _communication(sent: int, seen: str) -> Finding:
    text = f"{format_bytes(sent)} of the peak are buffers of a collective"
    mend = "smaller buckets: bucket_cap_mb of DistributedDataParallel, or gather layers one by one"
    return _finding("the peak is a communication buffer", text, seen, mend)


def _elsewhere(exam: Examination, plain: StepTrace, top: Peak, seen: str) -> Iterator[Finding]:
    """What the peak is made of that replays cannot move."""
    where = peak_in(StepView(plain), top)
    text = f"the peak is mostly {where.value}: {described(top)}"
    yield _finding(f"the peak is {where.value}", text, seen, _remedy(plain, top))
    if where in (PeakIn.STATE, PeakIn.OPTIMIZER):
        yield from _too_short(exam, plain, seen)


def _remedy(plain: StepTrace, top: Peak) -> str:
    """The best that is not a replay, by the advice of ``explain``, if it is worth something; no plans are searched for that."""
    as_it_is = FrontierPoint(top.bytes, top.bytes, top.step_s, 0.0, (), "rule")
    best = next(iter(advice(plain, points=(as_it_is,)).remedies), None)
    if best is None or best.saves_bytes < _HARDLY * top.bytes:
        return _SHARD
    return f"{best.title}: {best.how}"


def _communicated_bytes(trace: StepTrace, top: Peak) -> int:
    sent = {storage for op in trace.ops if op.collective for storage in (*op.reads, *op.writes)}
    state = (Category.PARAMETER, Category.OPTIMIZER)
    return sum(alive.bytes for alive in top.storages if alive.storage in sent and alive.category not in state)


def _too_short(exam: Examination, plain: StepTrace, seen: str) -> Iterator[Finding]:
    """From which length on it would matter, where activations grow with it and all else stays."""
    tokens = next((s.shape[-1] for s in plain.saved if s.node.startswith("EmbeddingBackward") and "int" in s.dtype and s.shape), None)
    activations, freed = _activation_bytes(plain), sum(row.freed_bytes for row in region_replays(plain, exam.paths))
    if tokens is None or exam.peak is None or freed <= _HARDLY * activations:
        return
    there = _bytes_at_the_turn(plain) - activations
    is_the_peak = (exam.peak.bytes / (1 - _HARDLY) - there) / activations
    is_enough = _HARDLY * there / (freed - _HARDLY * activations)
    length = math.ceil(tokens * max(is_the_peak, is_enough))
    if length > tokens:
        text = f"sequences of {tokens} make {format_bytes(activations)} of activations, where {format_bytes(there)} are there before them"
        yield _finding("sequence too short", text, seen, f"switch checkpointing off, or use it from a length of about {length} on")


def _bytes_at_the_turn(trace: StepTrace) -> int:
    turn = next((i for i, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD), len(trace.ops))
    kept = {saved.storage for saved in trace.saved}
    return sum(s.bytes for i, s in enumerate(trace.storages) if (s.resident and s.freed > turn) or i in kept)


def _activation_bytes(trace: StepTrace) -> int:
    """What autograd keeps at the turn from forward to backward."""
    kept = {saved.storage for saved in trace.saved}
    return sum(trace.storages[s].bytes for s in kept if not trace.storages[s].resident)


def _regions(exam: Examination, plain: StepTrace, seen: str) -> Iterator[Finding]:
    """Where activations are the peak: regions that free nothing, or that bring everything back at once."""
    rows = region_replays(plain, exam.paths)
    saved, freed = sum(row.saved_bytes for row in rows), sum(row.freed_bytes for row in rows)
    causes = [reason.cause for row in rows for reason in row.reasons]
    if len(exam.paths) == 1 and saved >= _EVERYTHING * _activation_bytes(plain):
        text = f"the one region {exam.paths[0] or '(model)'!r} saves {format_bytes(saved)}, all of which its replay brings back at once"
        yield _finding("one region over everything", text, seen, 'instead a region for each block: lowtide.apply(model, "full")')
    elif _is_fused(exam, plain) and freed < _HALF_FREED * max(saved, 1):
        text = f"{rows[0].name} calls a fused kernel, which never makes the matrix of attention weights"
        yield _finding("fused attention", text, seen, 'replay whole blocks instead: lowtide.apply(model, "full")')
    elif freed < _LITTLE_FREED * max(saved, 1) and any(cause in _OF_INPUTS for cause in causes):
        text = f"{len(exam.paths)} regions free {format_bytes(freed)} of {format_bytes(saved)} saved in them: their inputs are kept instead"
        mend = 'larger regions instead: lowtide.apply(model, "full"), or lowtide fit TARGET --budget 50%'
        yield _finding("regions too small", text, seen, mend)


def _is_fused(exam: Examination, plain: StepTrace) -> bool:
    """Whether regions are attention by a fused kernel and little else."""
    inside = [op for region, ops in exam.forward_of(plain).items() if region is not None for op in ops]
    fused = sum(op.seconds for op in inside if _FUSED.search(op.name))
    return fused > 0.5 * sum(op.seconds for op in inside)


def _finding(symptom: str, what: str, evidence: str, mend: str) -> Finding:
    return Finding(symptom, Severity.WARNING, what, evidence, mend)
