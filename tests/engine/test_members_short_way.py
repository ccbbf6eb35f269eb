"""Regions of several modules whose calls go the way of the call before: they are replayed in few steps, and whatever is new is noticed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine import Options, _steady, install
from lowtide.errors import InputChangedError, ReplayError

SIZE, COUNT = 8, 3


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(SIZE, SIZE), norm(SIZE), nn.Dropout(0.3)
        self.scale = 1.0
        self.deep = False

    def forward(self, x: torch.Tensor, other: torch.Tensor | float = 1.0) -> torch.Tensor:
        y = self.dropout(torch.tanh(self.norm(self.linear(x)))) * other * self.scale
        return x + (torch.sigmoid(y) if self.deep else y)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(Block(nn.BatchNorm1d if i == 1 else nn.LayerNorm) for i in range(COUNT))
        self.other: torch.Tensor | float = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x, self.other) if index else block(x)
            if index == 0:
                self.middle = x
        return x


class Pair:
    """The same chain with a region and without; every step is taken by both."""

    def __init__(self, **options: object) -> None:
        self.chains = []
        for _ in range(2):
            torch.manual_seed(0)
            self.chains.append(Chain())
        self.handle = install([(str(i), block) for i, block in enumerate(self.chains[1].blocks)], Options(**options))
        self.seed = 0

    def step(
        self,
        before: Callable[[Chain], object] = lambda _: None,
        between: Callable[[Chain], object] = lambda _: None,
        backward: Callable[[torch.Tensor], object] = lambda out: out.square().sum().backward(),
    ) -> None:
        """One step of both; what is done to the chain before its forward and between that and backward."""
        self.seed += 1
        found = []
        for chain in self.chains:
            torch.manual_seed(self.seed)
            chain.zero_grad()
            before(chain)
            x = torch.randn(5, SIZE, requires_grad=True)
            out = chain(x)
            between(chain)
            backward(out)
            buffers = [buffer.clone() for buffer in chain.buffers()]
            grads = [t.grad for t in (x, *chain.parameters()) if t.grad is not None]
            found.append([out.detach(), *grads, *buffers, torch.get_rng_state()])
        assert len(found[0]) == len(found[1])
        assert all(map(torch.equal, *found))


@pytest.fixture
def short(monkeypatch) -> list[bool]:
    """Whether replays went the short way, as they come."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # threads of what runs the tests draw nothing
    seen: list[bool] = []
    replay = _steady.replay_members

    def noting(frame, wanted):
        seen.append(replay(frame, wanted))
        return seen[-1]

    monkeypatch.setattr(_steady, "replay_members", noting)
    return seen


@pytest.fixture
def pair(short) -> Pair:
    """Its steps have come to go the short way."""
    pair = Pair()
    for _ in range(4):
        pair.step()
    assert short[-1]
    short.clear()
    return pair


def test_steps_that_go_the_way_of_the_one_before_are_replayed_in_the_short_way(pair, short):
    for _ in range(3):
        pair.step()
    assert short == [True] * 3


@pytest.mark.parametrize("place", range(COUNT))
def test_a_module_that_is_flipped_before_backward_is_replayed_as_it_was(pair, place):
    pair.step(between=lambda chain: chain.blocks[place].dropout.eval())
    pair.step()


@pytest.mark.parametrize("place", range(COUNT))
def test_a_module_that_is_flipped_before_a_step_is_watched_anew(pair, place, short):
    pair.step(before=lambda chain: chain.blocks[place].dropout.eval())
    for _ in range(3):
        pair.step()
    assert short[-1]


@pytest.mark.parametrize("place", range(COUNT))
def test_attributes_are_what_they_were(pair, place):
    pair.step(between=lambda chain: setattr(chain.blocks[place], "scale", 3.0))
    pair.step(before=lambda chain: setattr(chain.blocks[place], "scale", 2.0))
    pair.step(before=lambda chain: setattr(chain.blocks[place], "deep", True))
    pair.step(between=lambda chain: setattr(chain.blocks[place], "deep", False))
    pair.step()


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("place", range(COUNT))
def test_weights_that_are_written_to_before_backward_are_an_error(pair, place, name):
    # The weight autograd holds, and would miss; the bias matters in the replay alone.
    def write(chain: Chain) -> None:
        with torch.no_grad():
            getattr(chain.blocks[place].linear, name).mul_(2)

    with pytest.raises(InputChangedError):
        Pair.step(_region_only(pair), between=write)
    _put_right(pair)
    pair.step()


def _region_only(pair: Pair) -> Pair:
    alone = object.__new__(Pair)
    alone.chains, alone.seed = pair.chains[1:], 100
    return alone


def _put_right(pair: Pair) -> None:
    pair.chains[1].load_state_dict(pair.chains[0].state_dict())


@pytest.mark.parametrize("place", range(COUNT))
def test_modules_that_are_put_in_are_seen(pair, place):
    def put(chain: Chain) -> None:
        torch.manual_seed(7)
        chain.blocks[place].linear = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU())

    pair.step(before=put)
    pair.step()
    pair.step(between=lambda chain: setattr(chain.blocks[place], "linear", nn.Linear(SIZE, SIZE)))
    _put_right(pair)
    pair.step()


@pytest.mark.parametrize("place", range(COUNT))
def test_hooks_that_come_and_go(pair, place):
    handles = []

    def hook(chain: Chain) -> None:
        handles.append(chain.blocks[place].linear.register_forward_hook(lambda module, args, result: torch.tanh(result)))

    pair.step(before=hook)
    pair.step()
    pair.step(before=lambda _: handles.pop(0).remove())
    pair.step()


def test_later_members_may_be_given_something_else(pair, short):
    for other in (2.0, torch.randn(SIZE), torch.randn(SIZE, requires_grad=True), torch.randn(5, 1), 2.0, 2.0):
        pair.step(before=lambda chain, other=other: setattr(chain, "other", other))
        pair.step()
    assert short[-1]


def test_what_a_later_member_was_given_may_not_be_written_to_before_backward(pair):
    given = torch.randn(5, SIZE)
    for _ in range(3):
        pair.step(before=lambda chain: setattr(chain, "other", given))
    with pytest.raises(InputChangedError):
        _region_only(pair).step(between=lambda _: given.mul_(2))


def test_backward_may_run_again(pair, short):
    def backward(out: torch.Tensor) -> None:
        out.square().sum().backward(retain_graph=True)
        out.sum().backward()

    for _ in range(2):
        pair.step(backward=backward)
    assert all(short)


def test_backward_of_what_the_first_member_made(pair, short, monkeypatch):
    # The others are not run again.
    tanh, ran = torch.tanh, []
    monkeypatch.setattr(torch, "tanh", lambda x: (ran.append(lowtide.is_replaying()), tanh(x))[1])
    for _ in range(3):
        pair.step()
        short.clear(), ran.clear()
        for chain in pair.chains:
            torch.manual_seed(9)
            chain.zero_grad()
            chain(torch.linspace(-1, 1, 5 * SIZE).reshape(5, SIZE))
            chain.middle.square().sum().backward()
        grads = [[p.grad for p in chain.parameters() if p.grad is not None] for chain in pair.chains]
        assert all(map(torch.equal, *grads))
    assert short == [True]
    assert sum(ran) == 1


@pytest.mark.parametrize("early_stop", [True, False])
def test_replays_that_are_not_ended_early(short, early_stop):
    pair = Pair(early_stop=early_stop)
    for _ in range(5):
        pair.step()
    assert short[-1]


class Fickle(nn.Module):
    """Saves one tensor more where there is a file, which no guard sees."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        return torch.sigmoid(y) if self.file.exists() else y


@pytest.mark.parametrize("flipped", [{0}, {2}, {0, 1}, {1, 2}], ids=str)
def test_another_way_in_the_replay_is_an_error(flipped, tmp_path):
    # What two members save together may be as much as before.
    files = [tmp_path / str(i) for i in range(COUNT)]
    files[0].touch(), files[2].touch()
    blocks = nn.Sequential(*map(Fickle, files))
    install([(str(i), block) for i, block in enumerate(blocks)])
    x = torch.randn(5, SIZE, requires_grad=True)
    for _ in range(4):
        blocks(x).sum().backward()
    out = blocks(x)
    for place in flipped:
        files[place].unlink() if files[place].exists() else files[place].touch()
    with pytest.raises(ReplayError):
        out.sum().backward()


class Doubling(nn.Module):
    """Saves nothing of what it makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(x, 2)


def test_results_go_when_the_last_member_that_takes_them_has_run(short, monkeypatch):
    blocks = nn.Sequential(nn.Tanh(), *(Doubling() for _ in range(6)), nn.Tanh())
    install([(str(i), block) for i, block in enumerate(blocks)])
    run_again, made, alive = _steady.SteadyCall.run_again, [], []

    def watched(*args: object) -> torch.Tensor:
        result = run_again(*args)
        if isinstance(result, torch.Tensor):
            made.append(weakref.ref(result))
        alive.append(sum(ref() is not None for ref in made))
        return result

    monkeypatch.setattr(_steady.SteadyCall, "run_again", watched)
    for _ in range(4):
        blocks(torch.ones(3, requires_grad=True)).sum().backward()
    assert short[-1]
    assert len(alive) % 8 == 0
    assert max(alive) == 3  # what the first saved, what the one that runs is given, and what it makes


def test_nothing_is_alive_after_backward_that_was_not_before(pair, live_tensors):
    pair.step()
    before = live_tensors()
    for _ in range(3):
        pair.step()
    assert live_tensors() <= before


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        if self.fails:
            raise KeyError("batch")
        return y


@pytest.mark.parametrize("goes_back", [True, False])
def test_nothing_is_alive_after_a_member_that_raised(live_tensors, goes_back):
    """Before and after the members have come to go the short way; what the one before made can still be gone back through."""
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU()), Failing())
    install([(str(i), blocks[i]) for i in (1, 2)])
    made: list[torch.Tensor] = []
    blocks[1].register_forward_hook(lambda module, args, out: made.append(out))
    expected = torch.autograd.grad(nn.functional.gelu(blocks[1][0](blocks[0](torch.ones(3, 4)))).sum(), blocks[0].weight)
    made.clear()
    before = 0
    for step in range(8):
        blocks[2].fails = step % 2 == 1
        if blocks[2].fails:
            with pytest.raises(KeyError):
                blocks(torch.ones(3, 4))
            if goes_back:
                assert torch.equal(torch.autograd.grad(made[-1].sum(), blocks[0].weight)[0], expected[0])
        else:
            blocks(torch.ones(3, 4)).sum().backward()
        made.clear()
        before = live_tensors() if step == 1 else before
    assert live_tensors() <= before


@pytest.fixture
def live_tensors():
    import gc

    gc.collect()
    gc.disable()
    yield lambda: sum(isinstance(value, torch.Tensor) for value in gc.get_objects())
    gc.enable()
