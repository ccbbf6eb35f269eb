"""Plans of regions that drop the first of their saved tensors alone: right gradients, and the predicted peak, byte for byte."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.engine import Options, install
from lowtide.errors import InputChangedError, InvalidInputError
from lowtide.measure import live_storages, peak_bytes
from lowtide.plan import Plan, PlannedRegion, simulate
from lowtide.plan._candidates import candidates
from lowtide.plan._index import TraceIndex
from lowtide.plan._replay import replays_of, slots_of

SIZE, TOKENS = 32, 64


class Attending(nn.Module):
    """A norm, then attention that is one call: what it copies first is cheap, what it makes of that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(SIZE), nn.MultiheadAttention(SIZE, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Dropping(nn.Module):
    """Draws in front of the end and after it, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.gelu(self.one(x)).sin(), 0.3)
        return F.dropout(self.other(F.relu_(y * 2)).exp(), 0.2)


class Normed(nn.Module):
    """Statistics that a replay must not count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.other = nn.BatchNorm1d(TOKENS), nn.Linear(SIZE, SIZE), nn.BatchNorm1d(TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.tanh(self.linear(self.norm(x).sigmoid())))


MODELS: dict[str, Callable[[], nn.Module]] = {"attention": Attending, "dropout": Dropping, "batch norm": Normed}


class Subject:
    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(SIZE, SIZE), MODELS[name](), nn.Linear(SIZE, SIZE), MODELS[name](), nn.Linear(SIZE, SIZE))
        self.x = torch.randn(4, TOKENS, SIZE)
        self.buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.step()
        self.trace = lowtide.trace(self.model, self.step)
        self.resident = sum(storage.bytes for storage in self.trace.storages if storage.resident)

    def step(self) -> None:
        torch.manual_seed(1)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.model(self.x).square().sum().backward()

    def results(self) -> list[torch.Tensor]:
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(before)
        self.step()
        return [*(p.grad.clone() for p in self.model.parameters()), *(b.clone() for b in self.model.buffers()), torch.rand(2)]

    def applied(self, region: PlannedRegion) -> lowtide.Handle:
        return lowtide.apply(self.model, Plan((region,), self.trace.fingerprint, 0, 0, 0.0, 0.0, "by hand"))

    def more_than_predicted(self, region: PlannedRegion) -> int:
        """Bytes of the measured peak beyond what is simulated."""
        gc.collect()
        return peak_bytes(self.step, torch.device("cpu"), self.resident) - simulate(self.trace, [region]).peak_bytes


def ends(subject: Subject, paths: tuple[str, ...]) -> range:
    index = TraceIndex(subject.trace)
    return range(1, len(slots_of(index, replays_of(index, paths)[0].calls)))


@pytest.mark.parametrize("short", [True, False], ids=["alone", "beside other threads"])
@pytest.mark.parametrize("paths", [("1",), ("1", "2")], ids=["one", "several"])
@pytest.mark.parametrize("name", MODELS)
def test_every_end_has_the_peak_that_is_simulated(name: str, paths: tuple[str, ...], short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1 if short else 2)
    subject = Subject(name)
    plain = subject.results()
    more = []
    for count in (None, *ends(subject, paths)):
        region = PlannedRegion(paths, first_saved=count)
        handle = subject.applied(region)
        for _ in range(3):
            assert all(map(torch.equal, subject.results(), plain))
        more.append(subject.more_than_predicted(region))
        handle.remove()
    assert all(map(torch.equal, subject.results(), plain))
    # The statistics of batch norms, which regions keep as they were, and a generator's state: the same whatever is dropped.
    assert set(more) == {more[0]}
    assert 0 <= more[0] <= 16 + sum(buffer.nbytes for buffer in subject.buffers)


def test_a_region_that_dropped_all_before_keeps_the_last_when_told_to() -> None:
    """What was learned of a module holds whatever is dropped of it; what is kept must not be taken for what was dropped before."""
    subject = Subject("attention")
    plain = subject.results()
    for region in (
        PlannedRegion(("1",)),
        PlannedRegion(("1",), first_saved=4),
        PlannedRegion(("1",)),
        PlannedRegion(("1",), first_saved=7),
    ):
        handle = subject.applied(region)
        for _ in range(3):
            assert all(map(torch.equal, subject.results(), plain))
        assert subject.more_than_predicted(region) == 0
        handle.remove()


def test_what_ends_early_takes_less_time_and_frees_less() -> None:
    index = TraceIndex(Subject("attention").trace)
    found = [c for c in candidates(index).regions if c.paths == ("1",)]
    whole, early = (next(c for c in found if (c.first_saved is None) is whole and not c.kept) for whole in (True, False))
    assert early.freed_bytes < whole.freed_bytes
    assert len(early.replays[0].ops) < len(whole.replays[0].ops)


def test_gradients_of_gradients_and_of_parts_are_right() -> None:
    torch.manual_seed(0)
    model, x = Attending(), torch.randn(2, TOKENS, SIZE, requires_grad=True)

    def results() -> list[torch.Tensor]:
        y = model(x).square()
        part = torch.autograd.grad(y.mean(), [model.norm.weight, x], retain_graph=True, create_graph=True)
        again = torch.autograd.grad(y.sum(), [*model.parameters()], retain_graph=True)
        return [*part, *again, *torch.autograd.grad(sum(g.square().sum() for g in part), [*model.parameters()], allow_unused=True)]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = results()
        for count in (1, 3, 6, 8):
            handle = install([("model", model)], Options(first_saved=count))
            for _ in range(2):
                for got, want in zip(results(), plain, strict=True):
                    assert (got is None) is (want is None)
                    assert got is None or torch.equal(got, want)
            handle.remove()


def test_inside_a_region_and_under_other_hooks_gradients_are_right() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Dropping(), Dropping()), torch.randn(2, SIZE, requires_grad=True)

    def results() -> list[torch.Tensor]:
        torch.manual_seed(1)
        x.grad = None
        model(x).sum().backward()
        return [x.grad.clone()]

    plain = results()
    install([("0", model[0])], Options(first_saved=2))
    install([("", model)], around=True)
    for _ in range(3):
        assert all(map(torch.equal, results(), plain))
    with torch.autograd.graph.save_on_cpu():
        assert all(map(torch.equal, results(), plain))


def test_inside_a_region_nothing_is_kept_that_the_region_around_drops() -> None:
    """Nor does a replay of the region around leave anything behind that it has made again for a backward that has run."""

    def held(first_saved: int | None, *, around: bool) -> tuple[list[int], int]:
        torch.manual_seed(0)
        model, x = nn.Sequential(Dropping(), Dropping()), torch.randn(64, SIZE, requires_grad=True)
        install([("0", model[0])], Options(first_saved=first_saved))
        if around:
            install([("", model)], around=True)
        found = []
        for _ in range(4):
            gc.collect()
            before = live_bytes()
            result = model(x)
            gc.collect()
            found.append(live_bytes() - before - result.nbytes)
            result.sum().backward()
        del result
        gc.collect()
        return found, live_bytes() - before

    whole, early, alone = held(None, around=True), held(2, around=True), held(2, around=False)
    assert early[0][1:] == whole[0][1:]
    assert early[0][-1] < alone[0][-1]
    assert early[1] == whole[1] == alone[1]


def live_bytes() -> int:
    return sum(live_storages(None, torch.device("cpu")).values())


def test_what_is_kept_and_changed_before_backward_is_an_error_as_in_plain_autograd() -> None:
    model, x = Exponential(), torch.randn(2, SIZE, requires_grad=True)
    install([("model", model)], Options(first_saved=1))
    for _ in range(3):
        model(x).sum().backward()
        result = model(x)
        result.mul_(2)
        with pytest.raises(InputChangedError, match="modified by an inplace operation"):
            result.sum().backward()


class Exponential(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp()


@pytest.mark.parametrize("count", [0, -1])
def test_a_number_that_makes_no_sense(count: int) -> None:
    with pytest.raises(InvalidInputError, match="one or more"):
        Options(first_saved=count)
