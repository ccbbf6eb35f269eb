"""Saved in the middle of training and resumed, with a plan installed or not: the same losses as without a stop."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import lowtide

from ._loop import PLANS, Recipe, Training

RECIPE = Recipe(precision=partial(torch.autocast, "cpu", torch.bfloat16), scaled=True, pieces=2, clip=0.5)


@pytest.mark.parametrize("before", [*PLANS, None], ids=str)
@pytest.mark.parametrize("after", ["full", None], ids=str)
def test_training_goes_on_as_without_a_stop(before, after):
    whole = Training(RECIPE)
    start = torch.get_rng_state()
    whole.run(5)
    first = Training(RECIPE, before)
    torch.set_rng_state(start)
    first.run(2)
    saved = first.checkpoint()
    second = Training(RECIPE, after)
    second.resume(saved)
    second.run(3)
    for one, other in zip([*first.losses, *second.losses], whole.losses, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(second.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_what_is_saved_says_nothing_of_plans(tmp_path):
    plain, planned = Training(RECIPE), Training(RECIPE, "full")
    torch.save(planned.checkpoint(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert list(loaded["model"]) == list(plain.model.state_dict())
    assert all(type(value) is torch.Tensor for value in loaded["model"].values())


def test_a_plan_is_exchanged_in_the_middle_of_training():
    whole, changing = Training(RECIPE), Training(RECIPE, "full")
    start = torch.get_rng_state()
    whole.run(4)
    torch.set_rng_state(start)
    changing.run(2)
    changing.handle.remove()
    lowtide.apply(changing.model, "selective")
    changing.run(2)
    assert all(torch.equal(one, other) for one, other in zip(changing.losses, whole.losses, strict=True))


@pytest.mark.parametrize(("before", "after"), [("full", "selective"), ("selective", "none")])
def test_training_goes_on_in_another_process(tmp_path, before, after):
    whole = Training(RECIPE)
    start = torch.get_rng_state()
    whole.run(5)
    first = Training(RECIPE, before)
    torch.set_rng_state(start)
    first.run(2)
    torch.save(first.checkpoint(), tmp_path / "state.pt")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.training._resumed", str(tmp_path / "state.pt"), after]
    environment = {**os.environ, "PYTHONPATH": f"{Path(lowtide.__file__).parents[1]}{os.pathsep}{root}"}
    ran = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    assert [loss.item().hex() for loss in first.losses] + ran.stdout.split() == [loss.item().hex() for loss in whole.losses]
