"""A snapshot puts back all that a step may change."""

from __future__ import annotations

import gc
import gzip
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.policy._key_value_cache import CacheOff
from lowtide.trace import TrainingState, _freeze, _objects, find_optimizers


class Moody(nn.Module):
    """Keeps state in every way a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("ema", torch.zeros(3))
        self.calls = 0
        self.history: list[float] = []
        self.recent: deque[float] = deque(maxlen=2)
        self.last: torch.Tensor | None = None
        self.cache = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.python = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(float(x.sum()))
        self.recent.append(float(x.sum()))
        self.ema = 0.9 * self.ema + x.detach().mean(0)
        self.cache += 1
        self.last = x
        noise = torch.rand(3, generator=self.generator) + self.numpy.random() + self.python.random()
        return self.norm(self.linear(x * noise * random.random() * np.random.rand()))


def everything(model: Moody, optimizer: torch.optim.Optimizer) -> list[object]:
    values: list[object] = [v.tolist() for v in model.state_dict().values()]
    values += [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    values += [model.calls, list(model.history), list(model.recent), model.cache.tolist(), model.last is None, model.training]
    values += [model.generator.get_state().tolist(), model.numpy.bit_generator.state, model.python.getstate()]
    values += [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    values += [{k: v.tolist() for k, v in s.items()} for s in optimizer.state.values()] + [optimizer.param_groups[0]["lr"]]
    return values


def step(model: Moody, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5


def test_restores_everything_before_the_optimizer_has_state() -> None:
    model = Moody()
    optimizer = torch.optim.AdamW(model.parameters())
    before = everything(model, optimizer)
    state = TrainingState(model)
    step(model, optimizer)
    model.eval()
    assert everything(model, optimizer) != before
    state.restore()
    assert everything(model, optimizer) == before
    assert not optimizer.state


def test_restores_again_and_again_in_the_same_tensors() -> None:
    model = Moody()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before, identities = everything(model, optimizer), [id(t) for s in optimizer.state.values() for t in s.values()]
    state = TrainingState(model)
    for _ in range(3):
        step(model, optimizer)
        state.restore()
        assert everything(model, optimizer) == before
    assert [id(t) for s in optimizer.state.values() for t in s.values()] == identities


def test_restores_models_of_any_number_of_modules(monkeypatch) -> None:
    monkeypatch.setattr(_freeze, "_MOST_STRAYS", 10)
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    last = model[-1].weight
    last.grad = torch.ones(1, 1)
    optimizer.step()
    state = TrainingState(model)
    before = last.item(), optimizer.state[last]["momentum_buffer"].item()
    optimizer.step()
    assert (last.item(), optimizer.state[last]["momentum_buffer"].item()) != before
    state.restore()
    assert (last.item(), optimizer.state[last]["momentum_buffer"].item()) == before


def test_finds_the_optimizers_of_this_model_alone() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    mine = torch.optim.SGD(model.parameters())
    theirs = torch.optim.SGD(other.parameters())
    assert find_optimizers(model) == [mine]
    assert find_optimizers(other) == [theirs]


class Trainer:
    """Owns what a step uses, as people's training classes do."""

    def __init__(self) -> None:
        self.model, self.critic = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.generator = torch.Generator().manual_seed(1)
        self.steps, self.losses = 0, []
        self.memory = torch.zeros(3)
        self.pair = (torch.zeros(2), {"seen": 0})

    def step(self) -> None:
        x = torch.randn(4, 3, generator=self.generator)
        loss = self.critic(self.model(x)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.critic_optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.steps += 1
        self.losses.append(float(loss.detach()))
        self.memory = self.memory + x[0]
        self.pair[0].add_(1)
        self.pair[1]["seen"] += 1

    def everything(self) -> list[object]:
        modules = [[t.tolist() for t in m.state_dict().values()] for m in (self.model, self.critic, self.average)]
        gradients = [p.grad is None for m in (self.model, self.critic) for p in m.parameters()]
        optimizers = [repr(o.state_dict()) for o in (self.optimizer, self.critic_optimizer)]
        values = [self.scheduler.last_epoch, self.steps, list(self.losses), self.memory.tolist(), self.pair[0].tolist(), dict(self.pair[1])]
        return [modules, gradients, optimizers, values, self.generator.get_state().tolist()]


COUNTED = 0


def test_restores_what_a_bound_step_can_reach() -> None:
    trainer = Trainer()
    trainer.step()
    before = trainer.everything()
    state = TrainingState(trainer.model, trainer.step)
    for _ in range(2):
        trainer.step()
        assert trainer.everything() != before
        state.restore()
        assert trainer.everything() == before


def test_restores_variables_of_the_scopes_around_a_step() -> None:
    trainer, calls, seen = Trainer(), 0, {"last": None}

    def step() -> None:
        global COUNTED
        nonlocal calls
        COUNTED += 1
        calls += 1
        seen["last"] = calls
        trainer.step()

    before = trainer.everything()
    state = TrainingState(trainer.model, step)
    step()
    state.restore()
    assert (COUNTED, calls, seen, trainer.everything()) == (0, 0, {"last": None}, before)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_script_modules_are_restored() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.ReLU())
    before = [p.detach().clone() for p in model.parameters()]
    state = TrainingState(model)
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    state.restore()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_large_data_is_not_copied() -> None:
    data = torch.zeros(80 * 2**20, dtype=torch.uint8)
    model = nn.Linear(2, 2)
    state = TrainingState(model, lambda: float(data[0]))
    data[0] = 1
    state.restore()
    assert data[0] == 1


class Hooked(nn.Linear):
    """Puts a hook on itself in its first call, as libraries do that record what layers return."""

    hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.hooked:
            self.register_forward_hook(lambda *_: None)
            self.hooked = True
        return super().forward(x)


def test_hooks_that_a_step_makes_are_taken_away_and_those_it_takes_away_are_put_back() -> None:
    model = Hooked(2, 2)
    mine = model.register_forward_hook(lambda *_: None)
    state = TrainingState(model)
    for _ in range(3):
        model(torch.ones(1, 2))
        assert len(model._forward_hooks) == 2
        state.restore()
        assert [*model._forward_hooks] == [mine.id]
        assert not model.hooked
    mine.remove()
    state.restore()
    assert [*model._forward_hooks] == [mine.id]


def test_hooks_of_lowtide_stay() -> None:
    model = nn.Linear(2, 2)
    state = TrainingState(model)
    CacheOff(model)
    state.restore()
    assert len(model._forward_pre_hooks) == 1


class TestIterators:
    """What a step draws its data from."""

    def state(self, data):
        held = [data]
        model = nn.Linear(2, 2)
        return held, TrainingState(model, lambda: next(held[0]), iterators=True)

    def test_without_asking_they_are_left_alone(self):
        held = [iter(range(9))]
        TrainingState(nn.Linear(2, 2), lambda: next(held[0])).restore()
        assert type(held[0]) is type(iter(range(9)))

    def test_items_come_again_after_each_restore_and_as_they_were(self):
        held, state = self.state(iter([[1, 2], [3, 4], [5, 6]]))
        assert next(held[0]).pop() == 2
        state.restore()
        assert next(held[0]).pop() == 2
        state.restore()
        assert [*held[0]] == [[1, 2], [3, 4], [5, 6]]

    def test_random_numbers_for_an_item_count_as_drawn_again(self):
        held, state = self.state(torch.rand(2) for _ in range(9))
        first = next(held[0]), torch.rand(1)
        state.restore()
        again = next(held[0]), torch.rand(1)
        assert all(map(torch.equal, first, again))

    def test_a_step_that_drew_other_numbers_before_is_not_set_right(self):
        held, state = self.state(torch.rand(2) for _ in range(9))
        next(held[0])
        state.restore()
        torch.rand(1)
        drawn = torch.get_rng_state()
        next(held[0])
        assert torch.equal(drawn, torch.get_rng_state())

    def test_nothing_is_remembered_once_the_snapshot_is_gone(self):
        held, state = self.state(iter(range(9)))
        assert [next(held[0]) for _ in range(3)] == [0, 1, 2]
        state.restore()
        del state
        assert [next(held[0]) for _ in range(5)] == [0, 1, 2, 3, 4]
        assert not held[0]._items

    def test_a_snapshot_that_goes_without_a_restore_gives_nothing_twice(self):
        held, state = self.state(iter(range(9)))
        assert [next(held[0]) for _ in range(3)] == [0, 1, 2]
        del state
        assert [next(held[0]) for _ in range(3)] == [3, 4, 5]

    def test_a_file_is_no_data_of_this_kind(self, tmp_path):
        with gzip.open(tmp_path / "log", "wb") as log:
            held, _ = self.state(log)
            assert held[0] is log


@pytest.fixture
def frozen():
    """Everything that is there is hidden from the collector, as programs do that want no pauses."""
    gc.collect()
    yield gc.freeze
    gc.unfreeze()


def test_an_optimizer_that_was_frozen_is_put_back(frozen):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    frozen()
    count = gc.get_freeze_count()

    def step():
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    step()
    momentum = {name: state["momentum_buffer"].clone() for name, state in optimizer.state.items()}
    state = TrainingState(model, step)
    step()
    state.restore()
    assert find_optimizers(model) == [optimizer] == find_optimizers(model)
    assert all(optimizer.state[name]["momentum_buffer"].equal(value) for name, value in momentum.items())
    assert gc.get_freeze_count() >= count


def test_an_optimizer_made_after_something_was_frozen_is_found_beside_one_from_before(frozen):
    model = nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    frozen()
    assert find_optimizers(model) == optimizers
    optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    assert sorted(find_optimizers(model), key=id) == sorted(optimizers, key=id)
    gc.collect()
    assert sorted(find_optimizers(model), key=id) == sorted(optimizers, key=id)


def test_an_optimizer_is_found_when_the_collector_runs_while_the_newest_objects_are_looked_at(monkeypatch):
    model, look = nn.Linear(3, 3), _objects._instances

    def collected_before(generation):
        if generation is not None:
            gc.collect(generation)
        return look(generation)

    monkeypatch.setattr(_objects, "_instances", collected_before)
    gc.disable()  # else it may run in between anyway
    try:
        assert find_optimizers(model) == []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert find_optimizers(model) == [optimizer]
    finally:
        gc.enable()
