"""Transforms of ``torch.func`` and derivatives in forward mode: through regions, and inside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import lowtide
import lowtide.torch_compat
from lowtide.engine import install
from lowtide.records import CallSite, Decision

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[_Block() for _ in range(3)]).double()


def _segment(model: nn.Sequential) -> None:
    install([(str(index), block) for index, block in enumerate(model)])


def _nested(model: nn.Sequential) -> None:
    lowtide.apply(model, "full")
    install([("", model)], around=True)


WAYS: dict[str, Callable[[nn.Sequential], object]] = {
    "full": lambda model: lowtide.apply(model, "full"),
    "selective": lambda model: lowtide.apply(model, "selective"),
    "segment": _segment,
    "nested": _nested,
}

x = torch.linspace(-1, 1, 4, dtype=torch.float64)
rows = torch.linspace(-2, 1, 12, dtype=torch.float64).reshape(3, 4)


def _parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _loss(model: nn.Module, parameters: dict[str, torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    return functional_call(model, parameters, (given,)).square().sum()


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def _tangents(model: nn.Module) -> Any:
    given = rows.clone().requires_grad_()
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(given, torch.ones_like(rows))))
        (found.tangent.square().sum() + found.primal.sum()).backward()
    return found.tangent, given.grad, _gradients(model)


def _tangents_of_parameters(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in model.named_parameters()}
        found = forward_ad.unpack_dual(functional_call(model, duals, (rows,)))
        (found.tangent.square().sum() + found.primal.sum()).backward()
    return found.tangent, _gradients(model)


def _forward_over_reverse(model: nn.Module) -> Any:
    given = rows.clone().requires_grad_()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given, torch.ones_like(rows))
        found = torch.autograd.grad(model(dual).square().sum(), [dual, *model.parameters()])
        return [tuple(forward_ad.unpack_dual(gradient)) for gradient in found]


def _tangents_of_a_backward(model: nn.Module) -> Any:
    given = rows.clone().requires_grad_()
    result = model(given)
    with forward_ad.dual_level():
        found = torch.autograd.grad(result, [given, *model.parameters()], forward_ad.make_dual(torch.ones_like(rows), rows))
        return [tuple(forward_ad.unpack_dual(gradient)) for gradient in found]


def _checked(model: nn.Module) -> Any:
    given = rows.clone().requires_grad_()
    torch.autograd.gradcheck(model, given, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    torch.autograd.gradgradcheck(model, given, check_fwd_over_rev=True, check_batched_grad=True)
    return ()


def _batched(model: nn.Module) -> Any:
    given = rows.clone().requires_grad_()
    vectors = torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)
    found = torch.autograd.grad(model(given), given, vectors, is_grads_batched=True, create_graph=True)[0]
    found.square().sum().backward()
    return found, given.grad, _gradients(model)


ASKED: dict[str, Callable[[nn.Module], Any]] = {
    "grad": lambda model: grad(lambda p: _loss(model, p, x))(_parameters(model)),
    "per sample": lambda model: vmap(grad(lambda p, row: _loss(model, p, row)), (None, 0))(_parameters(model), rows),
    "jacrev": lambda model: jacrev(model)(x),
    "jacfwd": lambda model: jacfwd(model)(x),
    "hessian": lambda model: hessian(lambda given: model(given).sum())(x),
    "jvp": lambda model: jvp(lambda p: _loss(model, p, x), (_parameters(model),), (_parameters(model),)),
    "vjp": lambda model: vjp(model, x)[1](torch.ones_like(x)),
    "tangents": _tangents,
    "tangents of parameters": _tangents_of_parameters,
    "forward over reverse": _forward_over_reverse,
    "tangents of a backward": _tangents_of_a_backward,
    "gradcheck": _checked,
    "batched": _batched,
}


def _leaves(found: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(found) if leaf is not None]


@pytest.mark.parametrize("asked", ASKED.values(), ids=list(ASKED))
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_derivatives_through_a_model_with_regions(way, asked):
    plain, model = _model(), _model()
    way(model)
    for _ in range(2):
        for one, other in zip(_leaves(asked(model)), _leaves(asked(plain)), strict=True):
            assert torch.equal(one, other)


def _energy(weight: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return torch.tanh(row @ weight).pow(3).sum()


INSIDE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "vmap(grad)": lambda w, x: vmap(grad(lambda row: _energy(w, row)))(torch.sin(x)),
    "grad of grad": lambda w, x: grad(lambda x: grad(lambda y: _energy(w, y))(x).square().sum())(torch.sin(x)),
    "hessian": lambda w, x: vmap(hessian(lambda row: _energy(w, row)))(torch.sin(x)).sum(-1),
    "jacfwd": lambda w, x: vmap(jacfwd(lambda row: torch.tanh(row @ w)))(torch.sin(x)).sum(-1),
    "jvp": lambda w, x: jvp(lambda y: torch.tanh(y @ w), (torch.sin(x),), (torch.cos(x),))[1],
}


def _keeps_some(site: CallSite) -> Decision:
    return Decision.KEEP if site.function in (torch.exp, torch.tanh) else Decision.RECOMPUTE


@pytest.mark.parametrize("options", [{}, {"policy": _keeps_some}], ids=["full", "keeps some"])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=list(INSIDE))
def test_transforms_inside_a_region(compare, inside, options):
    theirs = torch.autograd.graph.disable_saved_tensors_hooks

    def scenario(region):
        weight = torch.randn(4, 4, requires_grad=True)
        inner = region(lambda x: torch.exp(inside(weight, x)) * torch.sin(x @ weight))
        outer = region(lambda x: torch.cos(inner(torch.exp(x))))
        seen = []
        for run in (inner, outer) * 3:
            given = torch.randn(3, 4, requires_grad=True)
            run(given).sum().backward()
            seen.append((given.grad, weight.grad.clone()))
        return seen

    compare(scenario, **options)
    assert torch.autograd.graph.disable_saved_tensors_hooks is theirs


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_transforms_inside_a_region_of_pytorchs_function(use_reentrant):
    weight, run = torch.randn(4, 4, requires_grad=True), INSIDE["vmap(grad)"]
    for _ in range(3):
        given = torch.randn(3, 4, requires_grad=True)
        found = lowtide.torch_compat.checkpoint(lambda x: torch.exp(run(weight, x)), given, use_reentrant=use_reentrant)
        one = torch.autograd.grad(run(weight, given).exp().sum(), (given, weight))
        found.sum().backward()
        assert torch.equal(given.grad, one[0])
        assert torch.equal(weight.grad, one[1])
        weight.grad = None


def test_a_level_of_forward_mode_inside_a_region(compare):
    def scenario(region):
        weight = torch.randn(4, 4, requires_grad=True)
        inner = region(lambda x: torch.sin(x @ weight) * torch.exp(x))

        def body(x):
            y = torch.sin(x)
            with forward_ad.dual_level():
                found = forward_ad.unpack_dual(inner(forward_ad.make_dual(y, torch.ones_like(y))))
                tangent = found.tangent.clone()
            return torch.cos(tangent) * found.primal

        run, seen = region(body), []
        for _ in range(4):
            given = torch.randn(3, 4, requires_grad=True)
            run(given).sum().backward()
            seen.append((given.grad, weight.grad.clone()))
        return seen

    compare(scenario)


def test_hooks_of_the_users_own_inside_a_region_still_exclude_transforms():
    def body(x):
        with torch.autograd.graph.save_on_cpu():
            return grad(lambda y: torch.sin(y).sum())(x)

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        lowtide.checkpoint(body)(torch.ones(3, requires_grad=True))


@pytest.mark.parametrize(
    "checkpoint", [lowtide.checkpoint, lambda fn: lambda *args: lowtide.torch_compat.checkpoint(fn, *args, use_reentrant=False)]
)
def test_tangents_of_a_backward_through_nested_regions(checkpoint):
    weight = torch.randn(4, 4, requires_grad=True)
    inner = checkpoint(lambda x: torch.sin(x @ weight) * torch.exp(x))
    outer = checkpoint(lambda x: torch.cos(inner(torch.sin(x))))
    plain = _plain(weight)
    for _ in range(3):
        found = []
        for run in (outer, plain):
            given = rows.float().requires_grad_()
            result = run(given)
            with forward_ad.dual_level():
                gradients = torch.autograd.grad(result, (given, weight), forward_ad.make_dual(torch.ones_like(given), given.detach()))
                found.append([*forward_ad.unpack_dual(gradients[0]), *forward_ad.unpack_dual(gradients[1])])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _plain(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return torch.cos(torch.sin(y @ weight) * torch.exp(y))

    return run


def test_memory_that_stands_for_zeros_is_not_compared(compare):
    def scenario(region):
        weight = torch.randn(4, 4, requires_grad=True)
        run, seen = region(lambda x: INSIDE["jvp"](weight, x)), []
        for call in range(10):
            given = torch.randn(3, 4, requires_grad=True)
            result = run(given).sum()
            torch.full((4, 4), call + 0.5)  # memory of this size is not what it was by the time of the replay
            result.backward()
            seen.append((given.grad, weight.grad.clone()))
        return seen

    compare(scenario, check_values=True)


class _Inside(nn.Module):
    """Runs a transform inside; as a module, whose calls could go the short way."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.transform = nn.Linear(3, 3), transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transform(lambda row: (row.sin() * row).sum())(self.layer(x)).tanh().exp()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f)), lambda f: lambda x: vjp(f, x)[1](torch.ones(()))[0]])
def test_transforms_in_a_module_that_is_called_again(transform, nested):
    module = _Inside(transform)
    inner = lowtide.checkpoint(module)
    run = lowtide.checkpoint(lambda x: inner(x.cos())) if nested else inner
    for _ in range(5):
        x = torch.randn(2, 3, requires_grad=True)
        found = torch.autograd.grad(run(x).sum(), [x, *module.parameters()])
        expected = torch.autograd.grad(module(x.cos() if nested else x).sum(), [x, *module.parameters()])
        assert all(map(torch.equal, found, expected))
