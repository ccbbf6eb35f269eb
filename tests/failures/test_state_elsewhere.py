"""What a region reads from elsewhere, changed between forward and backward: the replay sees what the forward saw."""

from __future__ import annotations

import os
import random
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
import lowtide.torch_compat

SCALE = 1.0
SCALES = [1.0]
SETTINGS = types.SimpleNamespace(scale=1.0)
LOCAL = threading.local()
LOCAL.scale = 1.0


class Config:
    scale = 1.0


class Derived(Config):
    pass


def _global(x):
    return x * SCALE


def _container(x):
    return x * SCALES[0]


def _settings(x):
    return x * SETTINGS.scale


def _class(x):
    return x * Config.scale


def _thread(x):
    return x * LOCAL.scale


def _function(x):
    return x * _function.scale


def _by_name(x):
    return x * getattr(SETTINGS, "scale")  # noqa: B009


def _by_computed_name(x):
    return x * getattr(SETTINGS, "".join(("sc", "ale")))


def _by_dictionary(x):
    return x * vars(SETTINGS)["scale"]


def _of_type(x):
    return x * type(_OF_CLASS).scale


def _entry(x):
    return x * ENTRIES["first"][0].scale


def _environment(x):
    return x * float(os.environ.get("LOWTIDE_TEST_SCALE", "1"))


_function.scale = 1.0
_OF_CLASS = Derived()
ENTRIES = {"first": [_OF_CLASS]}


def _of_class(x):
    return x * _OF_CLASS.scale


class _Calls(nn.Module):
    """A module whose forward calls a function, as a helper of its own file would be."""

    scale = 1.0

    def __init__(self, helper):
        super().__init__()
        self.helper = helper
        self.config = types.SimpleNamespace(scale=1.0)

    def forward(self, x):
        return torch.exp(torch.sin(self.helper(x) * self.scale * self.config.scale)).cos()


def _closure():
    scale = 1.0

    def helper(x):
        return x * scale

    def put(value):
        nonlocal scale
        scale = value

    return helper, put


_PLACES = {
    "global": (_global, lambda value, _: globals().__setitem__("SCALE", value)),
    "container": (_container, lambda value, _: SCALES.__setitem__(0, value)),
    "settings": (_settings, lambda value, _: setattr(SETTINGS, "scale", value)),
    "attribute by name": (_by_name, lambda value, _: setattr(SETTINGS, "scale", value)),
    "attribute by a computed name": (_by_computed_name, lambda value, _: setattr(SETTINGS, "scale", value)),
    "attribute by dictionary": (_by_dictionary, lambda value, _: setattr(SETTINGS, "scale", value)),
    "class of an object": (_of_type, lambda value, _: setattr(Config, "scale", value)),
    "entry": (_entry, lambda value, _: setattr(_OF_CLASS, "scale", value)),
    "class": (_class, lambda value, _: setattr(Config, "scale", value)),
    "base class": (_of_class, lambda value, _: setattr(Config, "scale", value)),
    "thread": (_thread, lambda value, _: setattr(LOCAL, "scale", value)),
    "function": (_function, lambda value, _: setattr(_function, "scale", value)),
    "environment": (_environment, lambda value, _: os.environ.__setitem__("LOWTIDE_TEST_SCALE", str(value))),
    "class of the module": (_global, lambda value, _: setattr(_Calls, "scale", value)),
    "object of the module": (_global, lambda value, model: setattr(model.config, "scale", value)),
}


def _gradients(run, model, put, *given):
    seen = []
    for turn in range(6):
        there, later = (1.0, 3.0) if turn % 2 else (3.0, 1.0)
        put(there, model)
        x = torch.randn(3, 4, requires_grad=True)
        loss = run(x, *given).sum()
        put(later, model)
        loss.backward()
        seen.append(x.grad)
    put(1.0, model)
    return seen


@pytest.mark.parametrize("place", _PLACES)
def test_a_value_elsewhere(compare, monkeypatch, place):
    monkeypatch.setenv("LOWTIDE_TEST_SCALE", "1")
    helper, put = _PLACES[place]

    def scenario(region):
        model = _Calls(helper)
        return _gradients(region(model), model, put)

    compare(scenario)


class _Chooses(nn.Module):
    """Calls the helper, or the method that calls it, for some values only."""

    def __init__(self, helper):
        super().__init__()
        self.helper = helper

    def help(self, x):
        return self.helper(x)

    def forward(self, x, choice):
        if choice.item() > 0:
            x = self.help(x)
        return torch.exp(torch.sin(x)).cos()


@pytest.mark.parametrize("place", ["global", "settings", "environment", "function", "attribute by name"])
def test_a_value_that_a_branch_reads_which_no_watched_call_took(compare, monkeypatch, place):
    monkeypatch.setenv("LOWTIDE_TEST_SCALE", "1")
    helper, put = _PLACES[place]

    def scenario(region):
        run = region(_Chooses(helper))
        run(torch.randn(3, 4, requires_grad=True), torch.tensor(-1)).sum().backward()
        return _gradients(run, None, put, torch.tensor(1))

    compare(scenario)


def test_a_variable_of_a_function_that_a_module_holds(compare):
    def scenario(region):
        helper, put = _closure()
        model = _Calls(helper)
        return _gradients(region(model), model, lambda value, _: put(value))

    compare(scenario)


@pytest.mark.parametrize("place", _PLACES)
def test_a_value_elsewhere_with_the_names_of_torch(monkeypatch, place):
    monkeypatch.setenv("LOWTIDE_TEST_SCALE", "1")
    helper, put = _PLACES[place]
    model = _Calls(helper)

    def run(x):
        return lowtide.torch_compat.checkpoint(model, x, use_reentrant=False)

    torch.manual_seed(3)
    expected = _gradients(model, model, put)
    torch.manual_seed(3)
    assert all(map(torch.equal, _gradients(run, model, put), expected))


COUNT = 0


def _counts(x):
    global COUNT
    COUNT += 1
    return torch.exp(torch.sin(x * COUNT))


def test_a_global_counter_of_a_helper_ends_as_after_one_forward(compare):
    def scenario(region):
        global COUNT
        COUNT = 0
        run, seen = region(lambda x: _counts(x).cos()), []
        for _ in range(4):
            x = torch.randn(4, requires_grad=True)
            run(x).sum().backward()
            seen.append(x.grad)
        return seen, COUNT

    compare(scenario)


def test_the_guard_is_listed():
    run = lowtide.checkpoint(lambda x: torch.exp(torch.sin(_settings(x))))
    run(torch.randn(3, requires_grad=True)).sum().backward()
    names = [guard.name for guard in lowtide.engine.explain(run)]
    assert any("global 'SETTINGS'" in name and "SETTINGS.scale" in name for name in names)


def test_what_is_read_elsewhere_is_not_kept_alive():
    class Options:
        scale = 2.0

    run = lowtide.checkpoint(lambda x, options: torch.sin(torch.exp(x * options.scale)))
    options = Options()
    run(torch.randn(3, requires_grad=True), options).sum().backward()
    gone = weakref.ref(options)
    del options
    run(torch.randn(3, requires_grad=True), Options()).sum().backward()
    assert gone() is None


def test_a_weight_written_through_its_data_before_backward_is_an_error_in_the_first_step():
    layer = nn.Linear(4, 4)
    run = lowtide.checkpoint(lambda x: torch.exp(torch.sin(layer(torch.exp(x)))))
    out = run(torch.randn(3, 4, requires_grad=True)).sum()
    layer.weight.data.mul_(2)
    with pytest.raises(lowtide.errors.InputChangedError, match=r"\.data"):
        out.backward()


GENERATORS = {"torch": torch.Generator(), "python": random.Random(), "numpy": np.random.default_rng()}
ARRAY = np.ones(4, np.float32)
TENSOR = torch.ones(4)
_DRAWS = {
    "torch": lambda: torch.rand(4, generator=GENERATORS["torch"]),
    "python": lambda: float(GENERATORS["python"].random()),
    "numpy": lambda: float(GENERATORS["numpy"].random()),
}


class _Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x, choice):
        return torch.exp(torch.sin(x * self.draw() if choice.item() > 0 else x)).cos()


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("kind", _DRAWS)
def test_a_generator_elsewhere(compare, kind, start):
    def scenario(region):
        GENERATORS.update(torch=torch.Generator().manual_seed(3), python=random.Random(3), numpy=np.random.default_rng(3))
        run, seen = region(_Draws(_DRAWS[kind])), []
        for turn in range(8):
            x = torch.randn(3, 4, requires_grad=True)
            run(x, torch.tensor(1 if turn >= start else -1)).sum().backward()
            seen.append(x.grad)
        return seen, GENERATORS["torch"].get_state(), GENERATORS["python"].random(), float(GENERATORS["numpy"].random())

    compare(scenario)


class _Reads(nn.Module):
    def forward(self, x):
        return torch.exp(torch.sin(x * torch.tensor(ARRAY) * TENSOR)).cos()


def test_an_array_elsewhere(compare):
    def scenario(region):
        run, seen = region(_Reads()), []
        for turn in range(6):
            ARRAY[:] = 1 + turn
            x = torch.randn(3, 4, requires_grad=True)
            loss = run(x).sum()
            ARRAY[:] = 7
            loss.backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


@pytest.mark.parametrize("calls", [1, 2, 6])
def test_a_tensor_elsewhere_that_is_modified_is_the_error_of_plain_autograd(calls):
    for run in (_Reads(), lowtide.checkpoint(_Reads())):
        for _ in range(calls):
            loss = run(torch.randn(3, 4, requires_grad=True)).sum()
        TENSOR.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class _WritesElsewhere(nn.Module):
    def forward(self, x):
        TENSOR.mul_(1.1)
        return torch.exp(torch.sin(x * TENSOR.clone())).cos()


def test_a_tensor_elsewhere_that_the_region_writes_to(compare):
    def scenario(region):
        TENSOR.fill_(1)
        run, seen = region(_WritesElsewhere()), []
        for _ in range(6):
            x = torch.randn(3, 4, requires_grad=True)
            run(x).sum().backward()
            seen.append((x.grad, TENSOR.clone()))
        return seen

    compare(scenario)
