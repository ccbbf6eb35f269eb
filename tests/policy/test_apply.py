"""Installing a plan: in place, checked before anything is touched, and taken out without a trace."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from lowtide.errors import AlreadyAppliedError, PlanError
from lowtide.plan import Plan, PlannedRegion
from lowtide.policy import apply, fingerprint
from lowtide.records import Decision


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4)))


def plan_for(model: nn.Module, *regions: tuple[str, ...]) -> Plan:
    return Plan(tuple(PlannedRegion(paths) for paths in regions), fingerprint(model), 0, 0, 0.0, 0.0, "by hand")


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(torch.randn(16, 8)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def installed(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if "forward" in module.__dict__]


def test_gradients_are_unchanged_with_regions_and_segments() -> None:
    model = mlp()
    plain = gradients(model)
    handle = apply(model, plan_for(model, ("0",), ("1", "2"), ("3.1", "3.2")))
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))
    assert handle.replay_seconds() > 0


def test_names_types_and_state_dict_stay_as_they_are() -> None:
    model = mlp()
    names, state = [(n, type(m)) for n, m in model.named_modules()], list(model.state_dict())
    handle = apply(model, plan_for(model, ("0",), ("1", "2")))
    assert [(n, type(m)) for n, m in model.named_modules()] == names
    assert list(model.state_dict()) == state
    assert installed(model) == ["0", "1", "2"]
    handle.remove()
    assert installed(model) == []
    handle.remove()


def test_a_disabled_plan_replays_nothing() -> None:
    model = mlp()
    handle = apply(model, plan_for(model, ("0",), ("1", "2")))
    with handle.disabled():
        gradients(model)
    assert handle.replay_seconds() == 0
    gradients(model)
    assert handle.replay_seconds() > 0


def test_a_plan_for_another_structure_is_refused_with_nothing_installed() -> None:
    model = mlp()
    for other in (mlp(9), nn.Sequential(*mlp()[:3]), nn.Sequential(mlp())):
        with pytest.raises(PlanError, match="another model"):
            apply(model, plan_for(other, ("0",)))
    assert installed(model) == []


def test_a_plan_of_the_right_model_with_a_wrong_path_is_refused_with_nothing_installed() -> None:
    model = mlp()
    with pytest.raises(PlanError, match=r"'7'"):
        apply(model, plan_for(model, ("0",), ("7",)))
    assert installed(model) == []


def test_a_decision_that_cannot_be_carried_out_is_refused() -> None:
    model = mlp()
    plan = dataclasses.replace(plan_for(model), regions=(PlannedRegion(("0",), Decision.OFFLOAD),))
    with pytest.raises(PlanError, match="offload"):
        apply(model, plan)


def test_applying_twice_is_refused_and_keeps_the_first() -> None:
    model = mlp()
    first = apply(model, plan_for(model, ("1",)))
    with pytest.raises(AlreadyAppliedError, match="'1'"):
        apply(model, plan_for(model, ("0",), ("1",)))
    assert installed(model) == ["1"]
    first.remove()
    apply(model, plan_for(model, ("0",), ("1",)))


def test_a_copy_of_the_model_runs_on_its_own_parameters() -> None:
    model = mlp()
    apply(model, plan_for(model, ("0",), ("1", "2")))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    fresh = mlp()
    fresh.load_state_dict(twin.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(gradients(fresh), gradients(twin), strict=True))


def test_the_fingerprint_follows_structure_and_not_values() -> None:
    model = mlp()
    twin = mlp().double().float().eval()
    assert fingerprint(model) == fingerprint(twin)
    assert len({fingerprint(m) for m in (mlp(), mlp(9), mlp().double(), nn.Sequential(mlp()), nn.Sequential(*mlp()[:3]))}) == 5
