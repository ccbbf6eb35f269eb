"""``lowtide.fit`` in several processes: they agree on a plan, or stop together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _training import Model, batch, seed, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.distributed import on_ranks
from lowtide.errors import BudgetError, InfeasibleBudgetError, InvalidInputError, StepError
from lowtide.plan import PlannedRegion
from lowtide.records import Category
from lowtide.trace import record_step

NEVER_S = 3600.0
"""Longer than a group of processes may run: who waits for that long has failed."""


def _everywhere(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _made(rows, around=DistributedDataParallel):
    torch.manual_seed(0)
    model = around(Model(4))
    optimizer = torch.optim.AdamW(model.parameters())
    seed()
    x = batch(rows)

    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


def case_the_processes_agree_on_a_plan():
    """One process has a larger batch: its peak decides."""
    model, step = _made(48 + 16 * dist.get_rank())
    result = lowtide.fit(model, step, "75%", rounds=1)
    plans, budgets, peaks, traced = zip(
        *_everywhere((result.plan.to_json(), result.budget_bytes, result.peak_bytes, result.traced_peak_bytes)), strict=True
    )
    assert len(set(plans)) == len(set(budgets)) == len(set(peaks)) == 1
    assert budgets[0] == int(0.75 * max(traced)) > int(0.75 * min(traced))
    assert result.plan.regions
    assert result.peak_bytes <= result.budget_bytes
    assert (result.verification.equal, result.verification.repeatable) == (True, True), result.verification.summary
    losses = [float(step()) for _ in range(3)]
    assert result.handle.replay_seconds() > 0
    result.handle.remove()
    assert losses == [float(loss) for loss in _plain(48 + 16 * dist.get_rank())]


def _plain(rows):
    _, step = _made(rows)
    return [step() for _ in range(3)]


def _sharded(model):
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _split(model):
    """The same on all ranks, but for what each has of two layers of a block."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _state(model):
    """Copies of all parameters and gradients."""
    return [whole(t) for p in model.parameters() for t in (p, p.grad) if t is not None]


def case_what_is_spread_over_processes_is_put_back():
    for around in (_sharded, _split):
        model, step = _made(8, around)
        step()
        before = _state(model)
        result = lowtide.fit(model, step, "90%", rounds=1)
        result.handle.remove()
        assert (result.verification.equal, result.verification.repeatable) == (True, True), result.verification.summary
        assert all(torch.equal(one, other) for one, other in zip(_state(model), before, strict=True))


def case_a_sharded_step_is_traced_as_a_rank_has_it():
    """What a rank has of parameters, and the peak, as the trace of a process alone predicts it."""
    model, step = _made(64, _sharded)
    step()
    traced = record_step(model, step)
    resident = [s.bytes for s in traced.storages if s.category is Category.PARAMETER and s.resident]
    assert sum(resident) == sum(p.to_local().nbytes for p in model.parameters())
    alone, its_step = _made(64, lambda model: model)
    its_step()
    predicted = on_ranks(lowtide.trace(alone, its_step), dist.get_world_size(), 3, [f"blocks.{block}" for block in range(4)])
    for regions in ([], [PlannedRegion((f"blocks.{block}",)) for block in range(4)], [PlannedRegion(("blocks",))]):
        found, expected = (lowtide.simulate(trace, regions).peak_bytes for trace in (traced, predicted))
        assert abs(found / expected - 1) < 0.03, (regions, found, expected)


def case_gathers_are_priced_as_measured():
    """Frozen blocks that no gradient reaches: a replay gathers those again, and that takes as long on all processes."""

    def frozen(model):
        model.first.requires_grad_(False)
        model.blocks[:3].requires_grad_(False)
        return _sharded(model)

    model, step = _made(64, frozen)
    found = _everywhere([gather.seconds for gather in lowtide.fit(model, step, "95%", rounds=1).trace.gathers])
    assert found[0] == found[1]
    assert len(set(found[0][1:])) == 1  # of equal blocks


def case_fully_sharded():
    model, step = _made(64, _sharded)
    result = lowtide.fit(model, step, "75%", rounds=1)
    assert len(set(_everywhere(result.plan.to_json()))) == 1
    assert result.peak_bytes <= result.budget_bytes
    assert result.verified, (result.verification.summary, result.plan.regions)


def case_stages_have_plans_of_their_own():
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(4 + 4 * rank)))
    x = torch.randn(256, 8)
    result = lowtide.fit(model, lambda: model(x).square().mean().backward(), "80%", rounds=1, stage=rank)
    plans = _everywhere(result.plan.to_json())
    assert plans[0] != plans[1]
    assert result.peak_bytes <= result.budget_bytes


def _error_of(model, step, budget, **options):
    """What ``fit`` raises; it leaves no region behind."""
    try:
        lowtide.fit(model, step, budget, **{"rounds": 1, **options})
    except Exception as error:
        raised = error
    else:
        raise AssertionError("it raised nothing")
    assert not any("forward" in vars(part) for part in model.modules())
    return raised


def case_no_plan_fits():
    error = _error_of(*_made(32), 1000 if dist.get_rank() else "90%")
    assert type(error) in (InfeasibleBudgetError, StepError), error
    assert "no plan fits a peak of 1000 B" in str(error), error


def case_models_that_differ():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 + dist.get_rank())))
    x = torch.randn(64, 8)
    error = _error_of(model, lambda: torch.tanh(model(x)).sum().backward(), "90%")
    assert "models of different structure" in str(error), error


def case_a_budget_that_one_cannot_read():
    error = _error_of(*_made(16), "80 percent" if dist.get_rank() else "80%", timeout_s=NEVER_S)
    assert type(error) is (BudgetError if dist.get_rank() else StepError), error
    assert "cannot read the budget '80 percent'" in str(error), error


def case_options_that_differ():
    error = _error_of(*_made(16), "80%", rounds=1 + dist.get_rank(), timeout_s=NEVER_S)
    assert type(error) is InvalidInputError, error
    assert "rank 0 was given rounds=1, rank 1 rounds=2" in str(error), error


def _fails_on_one(model, step, calls, timeout_s):
    left = [calls]

    def failing():
        left[0] -= 1
        if dist.get_rank() == 1 and left[0] < 0:
            raise ArithmeticError("the data ran out")
        return step()

    error = _error_of(model, failing, "80%", timeout_s=timeout_s)
    if dist.get_rank() == 1:
        assert type(error) is ArithmeticError, error
    else:
        assert type(error) is StepError, error
        assert "rank 1 stopped, and all others with it: ArithmeticError: the data ran out" in str(error), error


def case_a_process_fails_while_the_others_compute():
    torch.manual_seed(0)
    model = Model(2)
    x = batch(16)
    _fails_on_one(model, lambda: model(x).square().mean().backward(), 4, timeout_s=NEVER_S)


def case_a_process_fails_while_the_others_wait_for_it_breaks():
    _fails_on_one(*_made(16), 3, timeout_s=15.0)  # waited for in full; on a busy machine a process may be seconds behind


def case_buffers_of_replicas_are_there_all_the_time():
    """Gradients are copied into them, so they hold as much; there are none where gradients are views of them."""
    model, step = _made(64)
    sizes = sum(p.nbytes for p in model.parameters())
    for _ in range(2):
        step()
    traced, alone = record_step(model, step), record_step(model.module, step)
    held, known = (sum(s.bytes for s in trace.storages if s.resident and s.category is Category.GRADIENT) for trace in (traced, alone))
    assert (held, known) == (2 * sizes, sizes)
    viewed, its_step = _made(64, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))
    for _ in range(2):
        its_step()
    storages = record_step(viewed, its_step).storages
    assert sum(s.bytes for s in storages if s.resident and s.category is Category.GRADIENT) == sizes
