"""A made-up fit: a chain of blocks with one real simulation, and measurements that are told what to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from lowtide.plan import Plan, PlannedRegion, Simulation, simulate
from lowtide.records import Call, Category, Op, Phase, SavedTensor, StepTrace, Storage

MIB = 2**20


@dataclass(frozen=True)
class Measured:
    peak_bytes: int
    step_s: float
    spread_s: float = 0.002
    replay_s: float = 0.0
    steps: int = 9


@dataclass(frozen=True)
class Verified:
    equal: bool = True
    repeatable: bool = True
    compared: int = 42
    summary: str = "equal to the last bit: 42 tensors (20 gradients)"


@dataclass(frozen=True)
class Fit:
    trace: StepTrace
    plan: Plan
    budget_bytes: int
    plain: Measured
    planned: Measured
    step_ratio: float
    before: Simulation
    after: Simulation
    verification: Verified = Verified()
    plain_fits: bool = True


def chain(blocks: int) -> StepTrace:
    """Each block runs a linear (8 MiB, saved by the GELU) and a GELU (8 MiB, the next block's input, saved by its linear)."""
    ops: list[Op] = []
    saved: list[SavedTensor] = []
    calls = [Call("", "Net", None, 0, 2 * blocks, (blocks,), (3 * blocks,))]
    total = 5 * blocks + 2
    storages = [Storage(MIB, Category.PARAMETER, 0, total, True) for _ in range(blocks)]
    storages.append(Storage(8 * MIB, Category.INPUT, 0, total, True))
    kept_in = blocks
    for i in range(blocks):
        hidden, out = len(storages), len(storages) + 1
        # the linear's output is gone after the GELU, the GELU's output after the next linear
        storages.append(Storage(8 * MIB, Category.ACTIVATION, 2 * i, 2 * i + 2, False))
        storages.append(Storage(8 * MIB, Category.ACTIVATION, 2 * i + 1, 2 * i + 3, False))
        calls.append(Call(f"blocks.{i}", "Block", 0, 2 * i, 2 * i + 2, (kept_in,), (out,)))
        source = f"net.py:{10 + i}"
        ops.append(Op("aten.addmm.default", Phase.FORWARD, i + 1, source, 4e-3, 0, False, (kept_in, i), ()))
        ops.append(Op("aten.gelu.default", Phase.FORWARD, i + 1, source, 1e-3, 2 * MIB, False, (hidden,), ()))
        back = 2 * blocks + 1 + 2 * (blocks - 1 - i)
        saved.append(SavedTensor(kept_in, 8 * MIB, i + 1, 2 * i + 1, back + 1, back + 2, "AddmmBackward0"))
        saved.append(SavedTensor(hidden, 8 * MIB, i + 1, 2 * i + 2, back, back + 1, "GeluBackward0"))
        kept_in = out
    ops.append(Op("aten.mean.default", Phase.FORWARD, None, "train.py:3", 1e-4, 0, False, (kept_in,), ()))
    for i in reversed(range(blocks)):
        ops.append(Op("aten.gelu_backward.default", Phase.BACKWARD, i + 1, "", 1e-3, 0, False, (), ()))
        ops.append(Op("aten.mm.default", Phase.BACKWARD, i + 1, "", 8e-3, 4 * MIB, False, (), ()))
        storages.append(Storage(MIB, Category.GRADIENT, len(ops) - 1, total, False))
    ops += [Op("aten._foreach_add_.List", Phase.OPTIMIZER, None, "train.py:5", 5e-4, 0, False, (), ()) for _ in range(blocks + 1)]
    return StepTrace(tuple(ops), tuple(storages), tuple(saved), tuple(calls), "chain", "cpu")


@pytest.fixture
def make_fit() -> Callable[..., Any]:
    """``make_fit(blocks=6, regions=[("blocks.0",)], **changes)``."""

    def make(blocks: int = 6, regions: list[tuple[str, ...]] | None = None, **changes: Any) -> Fit:
        trace = chain(blocks)
        chosen = [("blocks.1",), ("blocks.2", "blocks.3")] if regions is None else regions
        before = simulate(trace, None)
        after = simulate(trace, [PlannedRegion(paths) for paths in chosen])
        budget = after.peak_bytes + MIB
        predicted = {"predicted_peak_bytes": after.peak_bytes, "predicted_step_s": after.step_s, "predicted_replay_s": after.replay_s}
        plan = Plan(tuple(map(PlannedRegion, chosen)), "chain", budget, **predicted, solver="exact", status="optimal", device="cpu")
        plain = Measured(before.peak_bytes, before.step_s)
        planned = Measured(after.peak_bytes + 1000, after.step_s, replay_s=after.replay_s)
        fields = {"budget_bytes": budget, "plain": plain, "planned": planned, "step_ratio": 1.07, **changes}
        return Fit(trace=trace, plan=plan, before=before, after=after, **fields)

    return make
