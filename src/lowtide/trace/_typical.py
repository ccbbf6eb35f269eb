"""Times of ops, without what disturbed a single one of them.

An op that ran while the machine did something else took longer than it ever will again. Models repeat themselves, so nearly every op of a
step has others of its kind and sizes; the median of them all is what the next one will take.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence

import torch

from lowtide.trace._ops import OpFacts

ENOUGH = 15
"""Ops of a kind that are timed: a median of more is no better, and to ask for the time of a thread takes a while."""


def kind_of(facts: OpFacts, tensors: Iterable[torch.Tensor]) -> Hashable:
    """What ops that take the same time have in common: operator, and shapes and types of what it reads."""
    return facts, *[(tensor.shape, tensor.dtype) for tensor in tensors]


def typical_seconds(kinds: Sequence[Hashable], seconds: Sequence[float | None]) -> list[float]:
    """The median time of each op's kind; ``None`` for an op that was not timed.

    >>> typical_seconds(["a", "b", "a", "a", "a"], [1.0, 5.0, 9.0, 2.0, None])
    [2.0, 5.0, 2.0, 2.0, 2.0]
    """
    by_kind: dict[Hashable, list[float]] = {}
    for kind, spent in zip(kinds, seconds, strict=True):
        if spent is not None:
            by_kind.setdefault(kind, []).append(spent)
    medians = {kind: statistics.median(spent) for kind, spent in by_kind.items()}
    return [medians[kind] for kind in kinds]
