"""Random programs: straight-line code over a few tensors, with regions in regions, run plain or checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

Region = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Line:
    """One line: what is done to which of the tensors so far. Its result is appended to them."""

    what: str
    a: int = 0
    b: int = 0
    body: tuple[Line, ...] = ()
    returns: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """A region, what it returns and how its gradients are asked for."""

    body: tuple[Line, ...]
    returns: tuple[int, ...]
    backward: str


def _fresh(x: torch.Tensor) -> torch.Tensor:
    return x * 1


def _half_in_place(x: torch.Tensor) -> torch.Tensor:
    y = _fresh(x)
    y[:, :2].sin_()
    y[1].mul_(0.5)
    return y


def _scaled_without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = torch.sigmoid(x).mean()
    return x * scale


def _in_place_then_saved(x: torch.Tensor) -> torch.Tensor:
    y = _fresh(x).add_(1).tanh_()
    return torch.sin(y)


ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "norm": lambda x: F.layer_norm(x, (4,)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "noise": lambda x: x * torch.rand(3, 4),
    "view": lambda x: torch.cos(x.view(2, 6)).view(3, 4),
    "transpose": lambda x: x.t().contiguous().t(),
    "chunk": lambda x: torch.cat([c.exp() * 0.1 if i else c for i, c in enumerate(x.chunk(2, dim=1))], dim=1),
    "half in place": _half_in_place,
    "in place": _in_place_then_saved,
    "relu in place": lambda x: F.relu_(_fresh(x)),
    "no gradient": _scaled_without_gradient,
    "detached": lambda x: x.detach() * 0.5 + x,
}
TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "matmul": lambda x, y: torch.tanh(x @ y.t()) @ y,
    "where": lambda x, y: torch.where(x > 0, x, y),
}


def execute(body: Sequence[Line], tensors: Sequence[torch.Tensor], region: Region) -> list[torch.Tensor]:
    """Run lines on tensors; returns all tensors at the end."""
    known = list(tensors)
    for line in body:
        a, b = known[line.a % len(known)], known[line.b % len(known)]
        if line.what == "region":
            known.extend(region(as_function(line.body, line.returns, region))(*known))
        elif line.what in ONE:
            known.append(ONE[line.what](a))
        else:
            known.append(TWO[line.what](a, b))
    return known


def as_function(body: Sequence[Line], returns: Sequence[int], region: Region) -> Callable[..., list[torch.Tensor]]:
    """Lines as a function of tensors."""

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        known = execute(body, tensors, region)
        return [known[index % len(known)] for index in returns]

    return function


_index = st.integers(0, 30)
_returns = st.lists(_index, min_size=1, max_size=3).map(lambda found: tuple(-1 - index for index in found))


def _lines(inner: st.SearchStrategy[Line] | None) -> st.SearchStrategy[tuple[Line, ...]]:
    plain = st.builds(Line, what=st.sampled_from([*ONE, *TWO]), a=_index, b=_index)
    return st.lists(plain if inner is None else plain | inner, min_size=1, max_size=6).map(tuple)


def _region(body: st.SearchStrategy[tuple[Line, ...]]) -> st.SearchStrategy[Line]:
    return st.builds(Line, what=st.just("region"), body=body, returns=_returns)


_BACKWARDS = ("once", "twice", "penalty", "one by one", "some inputs")
PROGRAMS = st.builds(Program, body=_lines(_region(_lines(_region(_lines(None))))), returns=_returns, backward=st.sampled_from(_BACKWARDS))


def gradients(how: str, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Ask for gradients in one of several ways."""
    wanted = [o for o in outputs if o.requires_grad]
    total = sum((o.square().sum() for o in wanted), torch.zeros(()))
    if not wanted:
        return []
    if how == "one by one":
        found = [torch.autograd.grad(o.sum(), leaves, retain_graph=True, allow_unused=True) for o in wanted]
        return [g for grads in found for g in grads]
    if how == "some inputs":
        return [
            *torch.autograd.grad(total, leaves[:1], retain_graph=True, allow_unused=True),
            *torch.autograd.grad(total, leaves, allow_unused=True),
        ]
    if how == "penalty":
        first = [g for g in torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True) if g is not None]
        (total + sum(g.square().sum() for g in first)).backward()
        return [*first, *(leaf.grad for leaf in leaves)]
    total.backward(retain_graph=how == "twice")
    if how == "twice":
        total.backward()
    return [leaf.grad for leaf in leaves]


@pytest.fixture
def run() -> Callable[[Program, Region], list[Any]]:
    """Runs a program twice on leaves made from a fixed seed; gives outputs, gradients and the random state it leaves."""

    def twice(program: Program, region: Region) -> list[Any]:
        torch.manual_seed(3)
        seen: list[Any] = []
        for _ in range(2):
            leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
            given = [*leaves[:2], leaves[2] * 2, torch.randn(3, 4)]
            outputs = region(as_function(program.body, program.returns, region))(*given)
            found = gradients(program.backward, outputs, leaves)
            seen += [*(o.detach().clone() for o in outputs), *(None if g is None else g.detach().clone() for g in found)]
        return [*seen, torch.get_rng_state()]

    return twice
