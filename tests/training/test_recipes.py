"""Training with regions goes as training without, to the last bit, whatever else is in the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import lowtide

from ._loop import PLANS, Block, Model, Recipe, Training, assert_same

half = partial(torch.autocast, "cpu", torch.float16)
brain = partial(torch.autocast, "cpu", torch.bfloat16)


@contextmanager
def nested() -> Iterator[None]:
    with brain(), half(), torch.autocast("cpu", enabled=False), brain(cache_enabled=False):
        yield


RECIPES = {
    "float32": Recipe(),
    "bfloat16": Recipe(precision=brain),
    "bfloat16 around backward too": Recipe(precision=brain, exits_early=False),
    "float16 and scaled": Recipe(precision=half, scaled=True),
    "nested autocast": Recipe(precision=nested),
    "accumulated": Recipe(pieces=2),
    "accumulated, bfloat16, scaled and clipped": Recipe(precision=brain, scaled=True, pieces=2, clip=0.5),
    "clipped": Recipe(clip=0.1),
    "updated in backward": Recipe(in_backward=True),
    "offloaded": Recipe(precision=torch.autograd.graph.save_on_cpu),
    "offloaded, accumulated and updated in backward": Recipe(precision=torch.autograd.graph.save_on_cpu, pieces=2, in_backward=True),
    "updated in backward, bfloat16": Recipe(in_backward=True, precision=brain),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_recipe_with_and_without_regions(recipe, plan):
    planned, plain = Training(recipe, plan), Training(recipe)
    state = torch.get_rng_state()
    for training in (planned, plain):
        torch.set_rng_state(state)
        training.run(3)
        training.state = torch.get_rng_state()
    assert torch.equal(planned.state, plain.state)
    assert_same(planned, plain)


class CastsInside(Block):
    """Turns autocast on by itself, and leaves it before its last part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with brain():
            y = self.up(self.norm(x))
        return x + self.down(y.float())


@pytest.mark.parametrize("around", [brain, partial(torch.autocast, "cpu", enabled=False)])
def test_autocast_that_a_region_turns_on_itself(around):
    found = []
    for wrap in (lowtide.checkpoint, lambda fn: fn):
        torch.manual_seed(1)
        block = CastsInside()
        for _ in range(3):
            x = torch.randn(2, 3, 16, requires_grad=True)
            with around():
                loss = wrap(block)(x).square().sum()
            loss.backward()
            found.append([x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)])
    for one, other in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_accumulated_gradients_differ_from_one_batch_as_they_do_without_regions():
    def gradients(pieces: int, plan: object) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Model().eval()  # one batch and its parts have other statistics, and draw other masks
        if plan is not None:
            lowtide.apply(model, plan)
        x = torch.randn(4, 6, 16)
        for piece in x.chunk(pieces):
            (model(piece).square().mean() / pieces).backward()
        return [p.grad for p in model.parameters()]

    plain = [one - other for one, other in zip(gradients(1, None), gradients(2, None), strict=True)]
    planned = [one - other for one, other in zip(gradients(1, "full"), gradients(2, "full"), strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))
    assert any(difference.any() for difference in plain)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_updates_in_backward_beside_another_thread(plan):
    waiting = threading.Event()
    threading.Thread(target=waiting.wait, daemon=True).start()
    try:
        planned, plain = Training(RECIPES["updated in backward"], plan), Training(RECIPES["updated in backward"])
        state = torch.get_rng_state()
        for training in (planned, plain):
            torch.set_rng_state(state)
            training.run(3)
    finally:
        waiting.set()
    assert_same(planned, plain)
