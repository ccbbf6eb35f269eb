"""Statistics of batch norm: nobody copies them for a call that has no use for them, and whatever reads them finds them as they were."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine._guards import _modules
from lowtide.engine._guards._statistics import names_statistics
from lowtide.engine._profile import profile_of

SWITCH = {"on": False}
WHICH = ["running_var"]


class Reading(nn.Module):
    """Reads statistics in one way or another, besides normalizing."""

    def __init__(self, read: Callable[[Any, torch.Tensor], torch.Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm is None else norm
        self.read = types.MethodType(read, self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(torch.tanh(self.norm(self.linear(x))))  # type: ignore[no-any-return]


def nothing(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x


def by_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * self.norm.running_var.mean() + self.norm.running_mean


def by_another_name(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * getattr(self.norm, WHICH[0]).sum()


def in_a_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * sum(self.norm.running_mean.tolist())


def in_a_branch(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(self.norm.running_var[0]) if SWITCH["on"] else x * 2.0


def in_another_function(self: Any, x: torch.Tensor) -> torch.Tensor:
    return scaled(self.norm, x) if SWITCH["on"] else x * 2.0


def scaled(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return x * float(norm.running_var[0])


def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x / float(self.norm.num_batches_tracked)


class Renorm(nn.BatchNorm1d):
    """Divides by what it kept from the batches before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_var is not None
        kept = self.running_var.clone()
        return super().forward(x) * (kept + 1).sqrt()  # type: ignore[no-any-return]


def steps(module: nn.Module, run: Callable[..., Any], modes: list[bool], batches: int = 2) -> list[torch.Tensor]:
    """Gradients and buffers of several steps, in each of which there are several forwards before the first backward."""
    torch.manual_seed(0)
    found = []
    for at, mode in enumerate(modes):
        SWITCH["on"] = at % 3 == 2
        module.train(mode)
        module.zero_grad()
        inputs = [torch.randn(5, 4, requires_grad=True) for _ in range(batches)]
        losses = [run(x).square().sum() for x in inputs]
        for loss in losses if at % 2 else losses[::-1]:
            loss.backward()
        found += [x.grad for x in inputs] + [p.grad.clone() for p in module.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in module.buffers()]
    return found


def check_equal(module: nn.Module, modes: list[bool]) -> None:
    """Bit for bit with plain autograd."""
    plain = copy.deepcopy(module)
    plain.read = types.MethodType(module.read.__func__, plain)  # type: ignore[union-attr]
    expected = steps(plain, plain, modes)
    found = steps(module, lowtide.checkpoint(module), modes)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("read", [nothing, by_name, by_another_name, in_a_list, in_a_branch, in_another_function, counted])
def test_gradients_and_buffers_are_those_of_the_plain_run(read):
    torch.manual_seed(1)
    check_equal(Reading(read), [True] * 6)


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm1d(4, momentum=None),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        lambda: nn.BatchNorm1d(4, affine=False),
        lambda: Renorm(4),
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4)),
    ],
)
def test_other_norms(norm):
    torch.manual_seed(1)
    check_equal(Reading(nothing, norm()), [True] * 6)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_that_the_first_forward_left_as_they_were(momentum):
    """Of a layer that starts with zeros the mean is zero, as statistics are at first."""
    found = []
    for wrap in (lambda module: module, lowtide.checkpoint):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4, momentum=momentum), nn.Tanh())
        nn.init.zeros_(module[0].weight)
        module(torch.randn(5, 4))  # with no momentum, the variance after the second forward is that of the first as well
        run, seen = wrap(module), []
        for _ in range(4):
            run(torch.randn(5, 4)).sum().backward()
            nn.init.ones_(module[0].weight)
            seen += [buffer.clone() for buffer in module.buffers()]
        found.append(seen)
    assert all(map(torch.equal, *found))


def test_training_and_evaluation_in_turn():
    torch.manual_seed(1)
    check_equal(Reading(nothing), [True, True, False, True, False, False, True, True, False])


def test_a_forward_in_evaluation_is_replayed_with_the_statistics_that_it_used():
    found = []
    for wrap in (lambda module: module, lowtide.checkpoint):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        run = wrap(module)
        steps(module, run, [True] * 4 + [False] * 4)
        x = torch.randn(5, 4, requires_grad=True)
        loss = run(x).square().sum()
        module.train()
        with torch.no_grad():
            module(torch.randn(50, 4) * 9)
        module.eval()
        loss.backward()
        found.append(module[3].weight.grad)  # of what comes after the norm, whose own backward reads what is in its buffers by now
    assert torch.equal(*found)


def copies_of_a_step(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many buffers a forward that goes the short way copies."""
    run = lowtide.checkpoint(module)
    for _ in range(4):
        run(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert profile_of(module).steady is not None
    versions = []
    settled = _modules.Watch.take_again

    def noting(watch: Any, *args: Any) -> Any:
        taken = settled(watch, *args)
        versions.append(taken)
        return taken

    monkeypatch.setattr(_modules.Watch, "take_again", noting)
    for watch, _, _ in profile_of(module).steady.watches:
        watch._settled = None
    run(torch.randn(5, 4, requires_grad=True)).sum().backward()
    return sum(tensor is not None and all(tensor is not own for own in _all_of(module)) for taken in versions for tensor in taken[0])


def _all_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


@pytest.mark.parametrize(("read", "copied"), [(nothing, 0), (by_name, 3), (in_a_branch, 3), (in_another_function, 3), (in_a_list, 3)])
def test_only_what_nothing_reads_is_not_copied(read, copied, monkeypatch):
    SWITCH["on"] = False
    assert copies_of_a_step(Reading(read), monkeypatch) == copied


def test_another_forward_of_the_norm_is_replayed_with_what_it_read():
    def scaling(self: Any, x: torch.Tensor) -> torch.Tensor:
        kept = self.running_var.clone()
        return nn.BatchNorm1d.forward(self, x) * kept  # type: ignore[no-any-return]

    found = []
    for wrap in (lambda module: module, lowtide.checkpoint):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        run = wrap(module)
        first = steps(module, run, [True] * 4)
        module[1].forward = types.MethodType(scaling, module[1])
        found.append(first + steps(module, run, [True] * 4))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("wrap", [lambda module: module, lowtide.checkpoint])
def test_statistics_that_were_reset_before_backward_are_an_error_as_in_the_plain_run(wrap):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    run = wrap(module)
    for _ in range(4):
        run(torch.randn(5, 4, requires_grad=True)).sum().backward()
    loss = run(torch.randn(5, 4, requires_grad=True)).sum()
    module[1].reset_running_stats()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_which_functions_might_look_at_statistics():
    assert names_statistics(by_name.__code__)
    assert names_statistics(in_a_branch.__code__)
    assert names_statistics((lambda: [lambda m: m.running_mean]).__code__)
    assert names_statistics((lambda m: getattr(m, "running_var")).__code__)  # noqa: B009
    assert not names_statistics(nothing.__code__)


def test_explain_tells_which_are_copied_and_which_are_not():
    for read, wanted in ((nothing, "copies of norm.running_mean, norm.running_var, norm.num_batches_tracked for replays"), (by_name, "")):
        module = Reading(read)
        run = lowtide.checkpoint(module)
        for _ in range(4):
            run(torch.randn(5, 4, requires_grad=True)).sum().backward()
        names = [guard.name for guard in lowtide.explain(run)]
        assert ("copies of norm.running_mean, norm.running_var, norm.num_batches_tracked" in names) is not bool(wanted)
        assert (wanted in names) is bool(wanted)
