"""Regions of objects and functions that run other regions, once their calls go the short way: what may change, and who else looks on."""

from __future__ import annotations

import gc
import operator
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine._profile import profile_of

torch.manual_seed(0)
LAYERS = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(6)]


class Chain:
    """Runs what is in a list one after the other, and scales the result."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts, self.scale = parts, 1.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x * self.scale


def nested(layers: list[nn.Module]) -> tuple[Any, list[Chain]]:
    """Four layers, pairs of them in regions, and these in one; with the objects, the outermost last."""
    inner = [lowtide.checkpoint(layer) for layer in layers]
    pairs = [Chain(inner[:2]), Chain(inner[2:])]
    outer = Chain([lowtide.checkpoint(pair) for pair in pairs])
    return lowtide.checkpoint(outer), [*pairs, outer]


def plain(layers: list[nn.Module], scales: tuple[float, float, float] = (1.5, 1.5, 1.5)) -> Any:
    """The same without regions."""

    def run(x: torch.Tensor) -> torch.Tensor:
        first = layers[1](layers[0](x)) * scales[0]
        return layers[3](layers[2](first)) * scales[1] * scales[2]

    return run


def gradients(y: torch.Tensor, x: torch.Tensor, layers: list[nn.Module], **options: Any) -> list[torch.Tensor]:
    return [*torch.autograd.grad(y.square().sum(), [x, *(p for layer in layers for p in layer.parameters())], **options)]


def fresh() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))


def settled() -> tuple[Any, list[Chain]]:
    """Nested regions whose calls go the short way."""
    run, chains = nested(LAYERS[:4])
    for _ in range(4):
        x = fresh()
        gradients(run(x), x, LAYERS[:4])
    assert all(profile_of(chain).steady is not None for chain in chains)
    assert all(profile_of(layer).steady is not None for layer in LAYERS[:4])
    return run, chains


@pytest.mark.parametrize("retain", [False, True])
def test_gradients(retain):
    run, _ = settled()
    x, z = fresh(), fresh()
    y, wanted = run(x), gradients(plain(LAYERS)(z), z, LAYERS[:4])
    assert_same(gradients(y, x, LAYERS[:4], retain_graph=retain), wanted)
    if retain:
        assert_same(gradients(y, x, LAYERS[:4]), wanted)


def test_second_derivatives():
    run, _ = settled()
    found = []
    for call in (run, plain(LAYERS)):
        x = fresh()
        first = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)[0]
        found.append(gradients(first, x, LAYERS[:4], allow_unused=True, materialize_grads=True))
    assert_same(*found)


@pytest.mark.parametrize("when", ["before forward", "between"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_attribute_changes(which, when):
    run, chains = settled()
    x, z = fresh(), fresh()
    scales = [1.5, 1.5, 1.5]
    if when == "before forward":
        chains[which].scale = scales[which] = -0.5
    y = run(x)
    chains[which].scale = 0.25 if when == "between" else chains[which].scale
    assert_same(gradients(y, x, LAYERS[:4]), gradients(plain(LAYERS, tuple(scales))(z), z, LAYERS[:4]))


@pytest.mark.parametrize("when", ["before forward", "between"])
@pytest.mark.parametrize("how", ["entry", "list"])
@pytest.mark.parametrize("kind", ["region", "module", "method"])
def test_another_part(kind, how, when):
    run, chains = settled()
    layers = [LAYERS[0], LAYERS[4], LAYERS[2], LAYERS[3]]
    other = {"region": lowtide.checkpoint(LAYERS[4]), "module": LAYERS[4], "method": LAYERS[4].forward}[kind]
    x, z = fresh(), fresh()
    y = run(x) if when == "between" else None
    if how == "entry":
        chains[0].parts[1] = other
    else:
        chains[0].parts = [chains[0].parts[0], other]
    wanted = LAYERS[:4] if when == "between" else layers
    for _ in range(3):
        if y is None:
            x = fresh()
            y = run(x)
        assert_same(gradients(y, x, wanted), gradients(plain(wanted)(z), z, wanted))
        y, wanted = None, layers


def test_one_more_part():
    run, chains = settled()
    chains[1].parts.append(LAYERS[5])
    layers = [*LAYERS[:3], nn.Sequential(LAYERS[3], LAYERS[5])]
    x, z = fresh(), fresh()
    assert_same(gradients(run(x), x, layers), gradients(plain(layers)(z), z, layers))


def test_frozen_in_the_inner_region():
    run, _ = settled()
    x, z = fresh(), fresh()
    y = run(x)
    LAYERS[1].requires_grad_(False)
    try:
        found = torch.autograd.grad(y.square().sum(), [x, *LAYERS[0].parameters()])
    finally:
        LAYERS[1].requires_grad_(True)
    assert_same([*found], gradients(plain(LAYERS)(z), z, LAYERS[:1]))


def test_hooks_around_are_handed_the_same():
    run, _ = settled()
    handed: list[list[tuple[int, ...]]] = []
    for _ in range(2):
        shapes: list[tuple[int, ...]] = []

        def pack(tensor: torch.Tensor, shapes: list[tuple[int, ...]] = shapes) -> torch.Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor.clone()

        x, z = fresh(), fresh()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            y = run(x)
        assert_same(gradients(y, x, LAYERS[:4]), gradients(plain(LAYERS)(z), z, LAYERS[:4]))
        handed.append(shapes)
    assert handed[0] == handed[1] == [(3, 4)]


def test_an_input_that_is_modified_is_an_error():
    run, _ = settled()
    x = fresh()
    given = x * 1
    y = run(given)
    with torch.no_grad():
        given.add_(1)
    with pytest.raises(lowtide.InputChangedError):
        y.sum().backward()


def test_threads():
    run, _ = settled()
    z = fresh()
    wanted, found = gradients(plain(LAYERS)(z), z, LAYERS[:4]), []

    def work() -> None:
        for _ in range(5):
            x = fresh()
            found.append(gradients(run(x), x, LAYERS[:4]))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15
    for each in found:
        assert_same(each, wanted)


class _Interrupting(nn.Module):
    """Raises while there is no such file: no guard looks at files."""

    def __init__(self, file: Path, error: type[BaseException]) -> None:
        super().__init__()
        self.linear, self.path, self.error = nn.Linear(4, 4), str(file), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        if not os.path.exists(self.path):
            raise self.error
        return y


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_replay_around(error, tmp_path):
    file = tmp_path / "there"
    file.touch()
    layers = [_Interrupting(file, error), *LAYERS[1:4]]
    run, _ = nested(layers)
    for _ in range(4):
        x = fresh()
        gradients(run(x), x, layers)
    x, z = fresh(), fresh()
    y, wanted = run(x), gradients(plain(layers)(z), z, layers)
    file.unlink()
    with pytest.raises(error):
        gradients(y, x, layers, retain_graph=True)
    file.touch()
    assert torch.is_grad_enabled()
    assert_same(gradients(y, x, layers), wanted)


def test_nothing_is_left():
    def tensors() -> int:
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    run, _ = settled()
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(3):
            x = fresh()
            gradients(run(x), x, LAYERS[:4])
        del x
        assert tensors() == before
    finally:
        gc.enable()


def test_objects_are_let_go_of():
    """What is known of a region does not keep what it was called with, nor the object that it calls."""
    run, chains = settled()
    kept = [weakref.ref(chain) for chain in chains]
    del run, chains
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


class _Computed:
    """Reads an attribute in a way that no code shows."""

    def __init__(self, part: Any) -> None:
        self.part, self.scale = part, 1.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x).sin() * _SCALE_OF(self)


_SCALE_OF = operator.attrgetter("scale")


def test_an_attribute_that_no_code_names():
    target = _Computed(lowtide.checkpoint(LAYERS[0]))
    run = lowtide.checkpoint(target)
    for scale in (1.5, 1.5, 1.5, 1.5, 0.5):
        target.scale = scale
        x, z = fresh(), fresh()
        y = run(x)
        target.scale = 7.0
        assert_same(gradients(y, x, LAYERS[:1]), gradients(LAYERS[0](z).sin() * scale, z, LAYERS[:1]))
    assert profile_of(target).steady is not None


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * self.factor


@pytest.mark.parametrize("regions", [True, False])
def test_a_module_that_is_new_and_changes(regions):
    """The call that finds another module looks at what is in that one."""
    modules = [_Scaled(), _Scaled()]
    target = Chain([lowtide.checkpoint(modules[0]) if regions else modules[0], torch.tanh])
    run = lowtide.checkpoint(target)
    for _ in range(4):
        x = fresh()
        gradients(run(x), x, modules[:1])
    assert profile_of(target).steady is not None
    target.parts[0] = lowtide.checkpoint(modules[1]) if regions else modules[1]
    for _ in range(3):
        x, z = fresh(), fresh()
        y, wanted = run(x), gradients(torch.tanh(modules[1](z)) * 1.5, z, modules[1:])
        modules[1].factor = 3.0
        assert_same(gradients(y, x, modules[1:]), wanted)
        modules[1].factor = 0.5


class _Branching:
    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, x: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        y = self.part(x)
        if sign.item() > 0:
            return y.sin()
        return y.cos()


def test_an_object_that_saves_elsewhere():
    """As many tensors as before, of the same shapes, but saved in other lines: that is another way to go."""
    target = _Branching(lowtide.checkpoint(LAYERS[0]))
    run = lowtide.checkpoint(target)

    def check(sign: int) -> None:
        x, z = fresh(), fresh()
        y = LAYERS[0](z)
        wanted = gradients(y.sin() if sign > 0 else y.cos(), z, LAYERS[:1])
        assert_same(gradients(run(x, torch.tensor(sign)), x, LAYERS[:1]), wanted)

    for _ in range(4):
        check(1)
    before = profile_of(target).steady
    assert before is not None
    check(1)
    assert profile_of(target).steady is before
    check(-1)
    assert profile_of(target).steady is not before


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.first(a).tanh() * self.second(b).sin()


class _Around:
    """Gives a region what it has computed at different times, the later first; or one tensor twice."""

    def __init__(self, two: Any, layer: nn.Module, how: str) -> None:
        self.two, self.layer, self.how = two, layer, how

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        early = self.layer(x).exp()
        late = early if self.how == "one twice" else early.sin().cos()
        both = self.two(late, early) if self.how == "later first" else self.two(early, late)
        return both.exp().sin().tanh()


@pytest.mark.parametrize("how", ["later first", "later last", "one twice"])
def test_two_inputs(how):
    two = _Two()
    inner = lowtide.checkpoint(two)
    target = _Around(inner, LAYERS[0], how)
    run, layers = lowtide.checkpoint(target), [LAYERS[0], two]
    for _ in range(5):
        x, z = fresh(), fresh()
        wanted = gradients(_Around(two, LAYERS[0], how)(z), z, layers)
        assert_same(gradients(run(x), x, layers), wanted)
    assert profile_of(two).steady is not None
    assert profile_of(target).steady is not None


class _Slope:
    """Goes backward through a region inside it, in its replays as well."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(self.part(x).sum(), x, create_graph=True)[0] * x


def test_a_region_that_goes_backward_through_one_inside():
    run = lowtide.checkpoint(_Slope(lowtide.checkpoint(LAYERS[0])))
    for _ in range(5):
        x, z = fresh(), fresh()
        wanted = gradients(_Slope(LAYERS[0])(z), z, [LAYERS[0][0]])
        assert_same(gradients(run(x), x, [LAYERS[0][0]]), wanted)


def test_one_part_fewer():
    run, chains = settled()
    chains[1].parts.pop()
    layers = [*LAYERS[:3], nn.Identity()]
    for _ in range(3):
        x, z = fresh(), fresh()
        assert_same(gradients(run(x), x, layers), gradients(plain(layers)(z), z, layers))
