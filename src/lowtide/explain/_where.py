"""What a peak is made of, in one word: what a plan would have to move to lower it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from lowtide.explain._peak import IN_USE, Peak
from lowtide.explain._step import StepView
from lowtide.records import Category, Phase
from lowtide.units import format_bytes

_LARGE_SHARE = 0.3
_LOG_SOFTMAX = ("aten._log_softmax.", "aten.log_softmax.")


class PeakIn(str, Enum):
    """Where most of a peak is that replaying cannot move."""

    OPTIMIZER = "optimizer"
    LOGITS = "logits"
    TEMPORARIES = "temporaries"
    STATE = "parameters, gradients and optimizer state"
    ACTIVATIONS = "activations"


_STATE = (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER)


def peak_in(view: StepView, peak: Peak) -> PeakIn:
    """What the peak is mostly made of."""
    if peak.phase is Phase.OPTIMIZER:
        return PeakIn.OPTIMIZER
    logits = set(logits_family(view))
    if sum(s.bytes for s in peak.storages if s.storage in logits) >= _LARGE_SHARE * peak.bytes:
        return PeakIn.LOGITS
    if sum(peak.of(category) for category in _STATE) >= 0.5 * peak.bytes:
        return PeakIn.STATE
    passing = sum(s.bytes for s in peak.storages if s.category is Category.ACTIVATION and s.because == IN_USE and not s.nodes)
    if peak.of(Category.TEMPORARY) + passing >= _LARGE_SHARE * peak.bytes:
        return PeakIn.TEMPORARIES
    return PeakIn.ACTIVATIONS


def described(peak: Peak) -> str:
    """The peak in words."""
    parts = ", ".join(f"{format_bytes(size)} of {category.value}" for category, size in peak.categories[:3])
    return f"in {peak.phase.value}, at {peak.op_name} ({peak.path}), with {parts}"


def logits_family(view: StepView) -> list[int]:
    """What a loss over a vocabulary needs: logits, their casts and log-probabilities, and the gradients of these."""
    return list(dict.fromkeys(s for op in _losses(view) for s in _family(view, op)))


def logits_seconds(view: StepView) -> float:
    """Time of the ops that make the logits and their log-probabilities."""
    makers = {view.trace.storages[s].born for s in logits_family(view)}
    return sum((view.trace.ops[op].seconds for op in makers if view.trace.ops[op].phase is Phase.FORWARD), start=0.0)


def _losses(view: StepView) -> Iterator[int]:
    for i, op in enumerate(view.trace.ops):
        if op.phase is Phase.FORWARD and op.name.startswith(_LOG_SOFTMAX) and op.reads:
            yield i


def _family(view: StepView, loss: int) -> Iterator[int]:
    """Storages of at least half the size of the logits that live only around the loss."""
    logits = view.trace.ops[loss].reads[0]
    first = _first_of_chain(view, logits)
    size = view.trace.storages[logits].bytes
    until = _end_in_backward(view, first)
    for storage, record in enumerate(view.trace.storages):
        if not record.resident and first <= record.born < until and 2 * record.bytes >= size and record.category not in _STATE:
            yield storage


def _first_of_chain(view: StepView, logits: int) -> int:
    """The op that made the logits, before any cast."""
    born = view.trace.storages[logits].born
    op = view.op(born)
    if op is None or not op.name.startswith(("aten._to_copy", "aten.clone")) or not op.reads:
        return born
    before = view.trace.storages[op.reads[0]]
    return born if before.resident else before.born


def _end_in_backward(view: StepView, first: int) -> int:
    """The op of backward at which it is past what was saved from the logits on."""
    earlier = (s.used for s in view.trace.saved if s.position <= first and s.used is not None)
    later = (s.used for s in view.trace.saved if s.position > first + 1 and s.used is not None)
    return min(min(earlier, default=len(view.trace.ops)), max(later, default=first) + 8)
