"""The same step with something changed that lowtide does not do itself: sizes of some storages, or when they live.

Each change is a trace, so that ``simulate`` says what would become of the peak; nothing is read off a rule of thumb.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from lowtide.explain._step import StepView
from lowtide.records import Category, Op, Phase, StepTrace, Storage


def scaled(trace: StepTrace, factors: Mapping[int, float]) -> StepTrace:
    """With some storages smaller."""
    storages = tuple(replace(s, bytes=int(s.bytes * factors.get(i, 1.0))) for i, s in enumerate(trace.storages))
    return replace(trace, storages=storages)


def with_workspaces(trace: StepTrace, factors: Mapping[int, float]) -> StepTrace:
    """With the workspace of some ops smaller."""
    ops = tuple(replace(op, workspace_bytes=int(op.workspace_bytes * factors.get(i, 1.0))) for i, op in enumerate(trace.ops))
    return replace(trace, ops=ops)


def in_chunks(trace: StepTrace, storages: Collection[int], chunks: int) -> StepTrace:
    """With these storages, and the workspace of the ops that make them, made a part at a time."""
    makers = {trace.storages[s].born for s in storages}
    smaller = scaled(trace, dict.fromkeys(storages, 1 / chunks))
    return with_workspaces(smaller, dict.fromkeys(makers, 1 / chunks))


def offloaded(trace: StepTrace, storages: Collection[int]) -> StepTrace:
    """With these storages on the host from when only autograd keeps them until backward asks for them."""
    moved = set(storages)
    kept = tuple(tensor for tensor in trace.saved if tensor.storage not in moved)
    view = StepView(trace)
    back = tuple(_returned(view, storage) for storage in sorted(moved))
    return replace(trace, saved=kept, storages=(*trace.storages, *back))


def _returned(view: StepView, storage: int) -> Storage:
    """The bytes as they come back, one op before they are wanted."""
    record = view.trace.storages[storage]
    return Storage(record.bytes, record.category, max(first_use(view, storage) - 1, 0), int(view.end[storage]), False)


def first_use(view: StepView, storage: int) -> int:
    """The op before which backward first asks for something on this storage; the end of the step if it never does."""
    used = (view.trace.saved[slot].used for slot in view.slots_of_storage.get(storage, []))
    return min((u for u in used if u is not None), default=len(view.trace.ops))


def in_micro_batches(trace: StepTrace, parts: int) -> StepTrace:
    """With a part of the batch at a time; gradients of the parameters are there from one part to the next."""
    grown = {Category.ACTIVATION, Category.INPUT, Category.TEMPORARY}
    sizes = {s.bytes for s in trace.storages if s.category in (Category.PARAMETER, Category.GRADIENT)}
    batch = [i for i, s in enumerate(trace.storages) if s.category in grown and not (s.category is Category.TEMPORARY and s.bytes in sizes)]
    batch = [i for i in batch if not _is_of_optimizer(trace, trace.storages[i])]
    forward_and_backward = [i for i, op in enumerate(trace.ops) if op.phase is not Phase.OPTIMIZER]
    smaller = with_workspaces(scaled(trace, dict.fromkeys(batch, 1 / parts)), dict.fromkeys(forward_and_backward, 1 / parts))
    gradients = tuple(replace(s, born=0, resident=True) if s.category is Category.GRADIENT else s for s in smaller.storages)
    return replace(smaller, storages=gradients)


def _is_of_optimizer(trace: StepTrace, storage: Storage) -> bool:
    op: Op | None = trace.ops[storage.born] if storage.born < len(trace.ops) else None
    return not storage.resident and op is not None and op.phase is Phase.OPTIMIZER


def one_parameter_at_a_time(trace: StepTrace) -> StepTrace:
    """With an optimizer that updates each parameter by itself: of its temporaries one of the largest is alive at once."""
    largest = max((s.bytes for s in trace.storages if s.category is Category.PARAMETER), default=0)
    temporaries = [i for i, s in enumerate(trace.storages) if _is_of_optimizer(trace, s) and s.category is Category.TEMPORARY]
    fits = {op: largest for op in range(len(trace.ops)) if trace.ops[op].phase is Phase.OPTIMIZER}
    ops = tuple(
        replace(o, workspace_bytes=min(o.workspace_bytes, fits[i]) if i in fits else o.workspace_bytes) for i, o in enumerate(trace.ops)
    )
    by_op: dict[int, list[int]] = {}
    for i in temporaries:
        by_op.setdefault(trace.storages[i].born, []).append(i)
    factors = {i: _share_of(trace, group, largest) for group in by_op.values() for i in group}
    return scaled(replace(trace, ops=ops), factors)


def _share_of(trace: StepTrace, group: list[int], largest: int) -> float:
    """What is left of the results of one op over all parameters when it runs over one at a time."""
    total = sum(trace.storages[i].bytes for i in group)
    return min(1.0, largest / total) if total else 1.0
