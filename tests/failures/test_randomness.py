"""A replay draws what the forward drew, from whichever generator, and leaves the generators where the plain run leaves them."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import ReplayError


def test_dropout(compare, train):
    def scenario(region):
        block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))
        return train(region(block), block)

    compare(scenario)


def test_dropout_in_nested_and_sibling_regions(compare, train):
    def scenario(region):
        one, two = (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(2))
        inner, sibling = region(one), region(two)
        outer = region(lambda x: torch.sin(inner(F.dropout(x, 0.3)) + F.dropout(x, 0.4)))
        return train(lambda x: sibling(outer(F.dropout(x, 0.1))), [*one.parameters(), *two.parameters()])

    compare(scenario)


def test_python_randomness(compare, train):
    compare(lambda region: train(region(lambda x: torch.sin(random.random() * x) * random.gauss(0, 1))))


def test_layer_drop_by_python_randomness(compare, train):
    def scenario(region):
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def run(x):
            for layer in layers:
                if random.random() < 0.5:
                    x = torch.tanh(layer(x))
            return x * 1

        return train(region(run), layers, count=8)

    compare(scenario)


def test_numpy_global_randomness(compare, train):
    compare(lambda region: train(region(lambda x: torch.sin(float(np.random.rand()) * x) * np.random.randint(1, 9))))


def test_randomness_that_begins_after_the_first_calls(compare):
    def scenario(region):
        noisy = []
        run = region(lambda x: torch.sin(x * (random.random() if noisy else 1.0)) * (np.random.rand() if noisy else 1.0))
        seen = []
        for step in range(6):
            if step == 3:
                noisy.append(True)
            x = torch.randn(4, requires_grad=True)
            run(x).sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


def test_torch_randomness_that_begins_after_the_first_calls(compare):
    def scenario(region):
        block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
        run = region(block)
        seen = []
        for step in range(6):
            block.train(step >= 3)
            x = torch.randn(3, 4, requires_grad=True)
            run(x).sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


class _Noisy(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        mask = torch.rand(x.shape, generator=self.generator) > 0.5
        return torch.sin(x * mask)


def test_a_private_generator_on_the_module(compare, train):
    def scenario(region):
        generator = torch.Generator().manual_seed(3)
        return train(region(_Noisy(generator))), generator.get_state()

    compare(scenario)


def test_a_private_generator_in_an_argument(compare, train):
    def scenario(region):
        generator = torch.Generator().manual_seed(3)
        run = region(lambda x, source: torch.sin(x * torch.rand(x.shape, generator=source)))
        return train(lambda x: run(x, source=generator)), generator.get_state()

    compare(scenario)


def test_a_private_generator_in_a_container_argument(compare, train):
    def scenario(region):
        generator = torch.Generator().manual_seed(3)
        run = region(lambda batch: torch.sin(batch["x"] * torch.rand(4, generator=batch["source"])))
        return train(lambda x: run({"x": x, "source": generator})), generator.get_state()

    compare(scenario)


def test_a_private_generator_in_a_closure(compare, train):
    def scenario(region):
        generator = torch.Generator().manual_seed(3)
        return train(region(lambda x: torch.sin(x * torch.rand(x.shape, generator=generator)))), generator.get_state()

    compare(scenario)


def test_private_python_and_numpy_generators(compare, train):
    def scenario(region):
        python, numpy = random.Random(1), np.random.default_rng(1)
        run = region(lambda x: torch.sin(x * python.random()) * float(numpy.normal()))
        return train(run), python.random(), float(numpy.normal())

    compare(scenario)


@pytest.mark.parametrize("last", [True, False])
def test_noise_that_is_filled_after_it_was_saved(compare, train, last):
    def scenario(region):
        linear = nn.Linear(4, 4)
        rrelu = nn.RReLU()
        run = region(lambda x: rrelu(linear(x)) if last else torch.tanh(rrelu(linear(x))))
        return train(run, linear)

    compare(scenario)


def test_in_place_rrelu(compare, train):
    def scenario(region):
        linear = nn.Linear(4, 4)
        return train(region(lambda x: F.rrelu(linear(x), training=True, inplace=True)), linear)

    compare(scenario)


def test_a_thread_that_draws_from_the_global_generator_meanwhile_is_detected():
    started, drawn = threading.Event(), threading.Event()

    def draw():
        started.wait(10)
        torch.rand(5)
        drawn.set()

    def fn(x):
        x = F.dropout(x, 0.5) * x
        if not lowtide.is_replaying():
            started.set()
            drawn.wait(10)
        return F.dropout(torch.sin(x), 0.5) * x

    thread = threading.Thread(target=draw)
    thread.start()
    out = lowtide.checkpoint(fn)(torch.randn(100, requires_grad=True))
    thread.join()
    with pytest.raises(ReplayError):
        torch.sin(out).sum().backward()


def test_the_value_check_names_the_first_op_that_differs():
    def fn(x):
        y = torch.sin(x)
        noise = 2.0 if lowtide.is_replaying() else 1.0
        return torch.exp(torch.cos(y * noise))

    run = lowtide.checkpoint(fn, check_values=True)
    with pytest.raises(lowtide.ReplayMismatchError, match="mul"):
        run(torch.randn(4, requires_grad=True)).sum().backward()


def test_a_region_that_begins_to_draw_without_saving_what_it_drew(compare):
    def scenario(region):
        noise = [0.0]

        def fn(x):
            if noise[0]:
                x = x + torch.randn(3) * noise[0]
            return x.sin().exp()

        run, seen = region(fn), []
        for turn in range(6):
            noise[0] = float(turn > 3)
            x = torch.ones(3, requires_grad=True)
            y = run(x)
            torch.randn(2)
            y.sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 5, batch_first=True), nn.RReLU], ids=["lstm", "rrelu"])
def test_the_value_check_passes_over_memory_that_is_not_written(compare, make):
    def scenario(region):
        model = make()
        run, seen = region(model), []
        for _ in range(3):
            x = torch.randn(2, 3, 4, requires_grad=True)
            y = run(x.exp())
            (y[0] if isinstance(y, tuple) else y).exp().sum().backward()
            seen.append([x.grad, *(p.grad.clone() for p in model.parameters())])
            model.zero_grad()
            del y
        return seen

    compare(scenario, check_values=True)
