"""Batches of several sizes, and the other modes of the compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import lowtide
from lowtide.engine import install

from ._models import WIDTH, Block, Transformer, kept_bytes, stack, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
SIZES = 8, 5, 3, 8, 11, 7
WAYS: dict[str, Callable[[nn.Module], object]] = {
    "keeps some": lambda model: lowtide.apply(model, lowtide.policy.keep(lowtide.policy.op("aten.relu"))),
    "segment": lambda model: install([(str(index), block) for index, block in enumerate(model.children())]),
}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_sizes_in_turn(way, dynamic):
    plain, model, backend = stack(Block), stack(Block), CompileCounterWithBackend("aot_eager")
    way(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for one, other in zip(steps(compiled, model, SIZES), steps(plain, plain, SIZES), strict=True):
        assert torch.equal(one, other)
    assert backend.frame_count == {None: 2, True: 1, False: len(set(SIZES))}[dynamic]
    steps(model, model, (8, 8))
    assert kept_bytes(compiled) == kept_bytes(model)


def test_a_size_that_is_marked_as_dynamic():
    plain, model, backend = stack(Block), stack(Block), CompileCounterWithBackend("aot_eager")
    WAYS["keeps some"](model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def marked(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return compiled(x)

    for one, other in zip(steps(marked, model, SIZES), steps(plain, plain, SIZES), strict=True):
        assert torch.equal(one, other)
    assert backend.frame_count == 1


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {}], ids=str)
def test_inductor_saves_as_a_policy_says(options):
    """On a CPU ``reduce-overhead`` has no graphs to capture; it is to be taken all the same."""
    plain, model = stack(Transformer, 2), stack(Transformer, 2)
    lowtide.apply(model, "selective")
    compiled = torch.compile(model, fullgraph=True, **options)
    for one, other in zip(steps(compiled, model, (8, 8)), steps(plain, plain, (8, 8)), strict=True):
        torch.testing.assert_close(one, other)
    x = torch.randn(8, WIDTH)
    assert kept_bytes(compiled) < kept_bytes(torch.compile(plain, fullgraph=True))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x))
