"""Regions that read and write to buffers: a compiler's replay would read what the forward has left, so Python runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import lowtide
from lowtide.engine import install

from ._models import WIDTH, Block, stack, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")


class Buffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.linspace(0, 1, WIDTH))


class WrittenThenRead(Buffer):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return super().body(x) * self.mean


class ReadThenWritten(Buffer):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(super().body(x) + self.mean)
        self.mean.copy_(y.detach().mean(0))
        return y


class WrittenThroughAView(Buffer):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.mean[0] = x.detach().mean()
        return torch.sin(super().body(x) + self.mean)


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        spectral_norm(self.up)


def segment(model: nn.Module) -> object:
    return install([(str(index), block) for index, block in enumerate(model.children())])


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "policy": lambda model: lowtide.apply(model, "full"),
    "one by one": lambda model: [install([(str(index), block)]) for index, block in enumerate(model.children())],
    "segment": segment,
}


@pytest.mark.parametrize("kind", [WrittenThenRead, ReadThenWritten, WrittenThroughAView, Spectral])
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_gradients_and_buffers_are_those_of_python(way, kind):
    plain, model = stack(kind, 2), stack(kind, 2)
    way(model)
    why = "" if kind is Spectral else r"it reads a tensor of shape \(16,\) from elsewhere and writes to it"
    with pytest.warns(UserWarning, match=rf"could not take region .* into a graph \({why}"):
        found = steps(torch.compile(model, backend="aot_eager"), model)
    for one, other in zip(found, steps(plain, plain), strict=True):
        assert torch.equal(one, other)


def test_blocks_that_are_compiled_one_by_one_are_each_told_apart():
    plain, model = nn.Sequential(*stack(WrittenThenRead, 2), *stack(Block, 1)), nn.Sequential(*stack(WrittenThenRead, 2), *stack(Block, 1))
    lowtide.apply(model, lowtide.policy.by_layer_type({WrittenThenRead: lowtide.policy.full(), Block: lowtide.policy.full()}))
    for block in model:
        block.compile(backend="aot_eager")
    with pytest.warns(UserWarning, match="could not take region") as said:
        found = steps(model, model)
    for one, other in zip(found, steps(plain, plain), strict=True):
        assert torch.equal(one, other)
    assert len([warning for warning in said if "could not take region" in str(warning.message)]) == 2


def test_a_region_that_is_made_inside_what_is_compiled():
    block, plain = stack(WrittenThenRead, 1)[0], stack(WrittenThenRead, 1)[0]

    def made(x: torch.Tensor) -> torch.Tensor:
        return lowtide.checkpoint(lambda x: block(x) * 2)(x)

    with pytest.warns(UserWarning, match="could not take region"):
        found = steps(torch.compile(made, backend="aot_eager"), block)
    for one, other in zip(found, steps(lambda x: plain(x) * 2, plain), strict=True):
        assert torch.equal(one, other)


def test_in_one_graph_or_not_at_all():
    model = stack(WrittenThenRead, 2)
    lowtide.apply(model, "full")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.randn(4, WIDTH, requires_grad=True))
