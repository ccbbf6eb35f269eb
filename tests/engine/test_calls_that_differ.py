"""Calls of one region that are not alike: what an audit of one saw must not be taken to hold for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine import install
from lowtide.engine._audit import Audit


class _Block(nn.Module):
    """A residual block that calls one in-place ReLU twice, as torchvision's do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.conv2(y) + x)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    model(torch.randn(2, 4, 8, 8)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_an_in_place_module_of_a_segment_is_called_again_outside_of_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), _Block(), _Block())
    expected = [_gradients(model) for _ in range(4)]
    for path, block in (("1", model[1]), ("2", model[2])):
        install([(f"{path}.{name}", getattr(block, name)) for name in ("conv1", "norm1", "relu")])
    for plain in expected:
        assert all(map(torch.equal, plain, _gradients(model)))


def _flagged(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    y = x.mul_(2) if inplace else x * 2
    return torch.tanh(y).exp()


@pytest.mark.parametrize(
    "call",
    [
        lambda run, x: run(x, True),
        lambda run, x: run(x, inplace=True),
    ],
    ids=["positional", "keyword"],
)
def test_a_flag_that_no_audited_call_was_given(call: Callable[..., Any]):
    run = lowtide.checkpoint(_flagged)
    found = []
    for forward in (_flagged, run):
        for _ in range(3):
            forward(torch.ones(3, requires_grad=True) * 1).sum().backward()
        x = torch.full((3,), 0.3, requires_grad=True)
        call(forward, x * 1).sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0], found[1])


def test_a_flag_in_a_closure_that_no_audited_call_had():
    def run(wrap: Callable[..., Any], flag: bool) -> torch.Tensor:
        x = torch.full((3,), 0.3, requires_grad=True)
        wrap(lambda y: _flagged(y, flag))(x * 1).sum().backward()
        return x.grad

    for flag in (False, False, True, False):
        assert torch.equal(run(lambda fn: fn, flag), run(lowtide.checkpoint, flag))


@pytest.mark.filterwarnings("ignore:region .* is the only one of its step")
def test_calls_that_never_repeat_are_not_all_watched(monkeypatch: pytest.MonkeyPatch):
    from lowtide.engine import _region

    audits = []

    class Counting(_region.Audit):
        def run(self, *args: Any) -> Any:
            audits.append(1)
            return super().run(*args)

    monkeypatch.setattr(_region, "Audit", Counting)

    def fn(x: torch.Tensor, depth: int) -> torch.Tensor:
        for _ in range(depth):
            x = x.sin()
        return x

    run = lowtide.checkpoint(fn)
    for depth in range(1, 200):
        run(torch.ones(2, requires_grad=True), depth).sum().backward()
    assert len(audits) < 40


def test_a_module_in_the_region_is_exchanged():
    def gradients(wrap: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Tanh())
        run, found = wrap(model), []
        for turn in range(4):
            if turn == 2:
                model[1] = nn.BatchNorm1d(4)
            x = torch.randn(3, 4, requires_grad=True)
            run(x).exp().sum().backward()
            found += [x.grad, *(buffer.clone() for buffer in model.buffers())]
        return found

    assert all(map(torch.equal, gradients(lambda fn: fn), gradients(lowtide.checkpoint)))


def test_a_call_that_saves_nothing_is_followed_by_one_that_does():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh()).requires_grad_(False)
    run = lowtide.checkpoint(layer)
    x = torch.randn(2, 4)
    for _ in range(3):
        assert not run(x).requires_grad
    saved: list[torch.Tensor] = []
    layer[0].weight.requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(x)
    y.sum().backward()
    (expected,) = torch.autograd.grad(layer(x).sum(), [layer[0].weight])
    assert torch.equal(layer[0].weight.grad, expected)
    assert [tuple(tensor.shape) for tensor in saved] == [(2, 4)], "only the input is held"


def test_a_region_that_saves_nothing_inside_another_region():
    inner = lowtide.checkpoint(lambda t: t * 2)

    def outer(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x.sin() * inner(mask)).exp().sin()

    run = lowtide.checkpoint(outer)
    for _ in range(4):
        x = torch.full((3,), 0.3, requires_grad=True)
        run(x, torch.ones(3)).sum().backward()
        (expected,) = torch.autograd.grad(outer(y := x.detach().requires_grad_(), torch.ones(3)).sum(), y)
        assert torch.equal(x.grad, expected)


class _Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _closure(x: torch.Tensor, wrap: Callable[..., Any]) -> torch.Tensor:
    y = x.sin()
    return (wrap(lambda t: (t * y).exp())(x.cos()) * y).exp().sin()


def _object(x: torch.Tensor, wrap: Callable[..., Any]) -> torch.Tensor:
    holder = _Holder(x.cos())
    return wrap(lambda t: (t.sin() * holder.tensor).exp())(x.sin()).exp().sin()


def _constant(x: torch.Tensor, wrap: Callable[..., Any]) -> torch.Tensor:
    factor = torch.ones(3)
    return (x.sin() * wrap(lambda t: t * 2 * factor)(torch.ones(3))).exp().sin()


@pytest.mark.parametrize("body", [_closure, _object, _constant])
def test_a_region_made_inside_a_region_refers_to_tensors_of_it(body: Callable[..., Any]):
    run = lowtide.checkpoint(lambda x: body(x, lowtide.checkpoint))
    for _ in range(4):
        x, y = (torch.full((3,), 0.3, requires_grad=True) for _ in range(2))
        run(x).sum().backward()
        body(y, lambda fn: fn).sum().backward()
        assert torch.equal(x.grad, y.grad)


def test_functions_passed_through_one_wrapper_are_each_watched():
    def wrapped(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lowtide.checkpoint(lambda x: fn(x) * 1)

    def writes(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sin().exp().sin()

    for fn in (lambda x: x.sin().exp(), lambda x: x.cos().exp(), writes):
        x, expected = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        expected.data.copy_(x.data)
        (fn(expected * 1) * 1).sum().backward()
        wrapped(fn)(x * 1).sum().backward()
        assert torch.equal(x.grad, expected.grad)


def test_an_object_that_is_called_is_watched_once(monkeypatch):
    class Chain:
        def __init__(self, parts):
            self.parts = parts
            self.name = None

        def __call__(self, x):
            for part in self.parts:
                x = part(x)
            return x

    watched = []
    run = Audit.run
    monkeypatch.setattr(Audit, "run", lambda audit, *args: watched.append(audit) or run(audit, *args))
    inner = [lowtide.checkpoint(nn.Sequential(nn.Linear(3, 3), nn.GELU())) for _ in range(2)]
    outer = lowtide.checkpoint(Chain(inner))
    for _ in range(4):
        outer(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert len(watched) == 3


def test_what_an_import_in_the_first_call_reads_is_no_business_of_later_calls(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("SIZES = [1, 2]\n\n\ndef total():\n    return sum(SIZES)\n\n\nTOTAL = total()\n")
    monkeypatch.syspath_prepend(tmp_path)

    def body(x):
        import imported_late

        return torch.sin(x) * imported_late.TOTAL

    region, x = lowtide.checkpoint(body), torch.ones(3, requires_grad=True)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(region(x).sum(), x)[0], torch.autograd.grad(body(x).sum(), x)[0])
    assert not any("SIZES" in guard.name for guard in lowtide.explain(region))
