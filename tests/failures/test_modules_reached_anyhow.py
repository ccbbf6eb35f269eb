"""A region runs modules that it reaches in every way Python has, each time another one: all of them are guarded."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import types
import weakref
from collections import namedtuple

import pytest
import torch
from torch import nn


def block():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


class Holder:
    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x) * 2

    def through(self, x):
        return self.module(x) * 2


class Slots:
    __slots__ = ("module",)

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x)


class AllEqual(Holder):
    """Cannot be a key."""

    def __eq__(self, other):
        return True

    __hash__ = None


class ByProperty(Holder):
    @property
    def net(self):
        return self.module

    def __call__(self, x):
        return self.net(x)


class ByMethod(Holder):
    def net(self):
        return self.module

    def __call__(self, x):
        return self.net()(x)


class ItsForward(Holder):
    def __call__(self, x):
        return self.module.forward(x)


class ItsParts(Holder):
    def __call__(self, x):
        for part in self.module:
            x = part(x)
        return x


class ItsTensors(Holder):
    def __call__(self, x):
        linear, norm = self.module[0], self.module[1]
        x = nn.functional.linear(x, linear.weight, linear.bias)
        return nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training)


class Weakly:
    def __init__(self, module):
        self.ref = weakref.ref(module)

    def __call__(self, x):
        return self.ref()(x)


class InFunction:
    def __init__(self, module):
        def doubled(x):
            return module(x) * 2

        self.functions = [doubled]

    def __call__(self, x):
        return self.functions[0](x)


class ByBoundMethod:
    def __init__(self, module):
        self.run = Holder(module).through

    def __call__(self, x):
        return self.run(x)


class ByPartial:
    def __init__(self, module):
        self.run = functools.partial(lambda holder, x: holder.module(x), Holder(module))

    def __call__(self, x):
        return self.run(x)


class InLongList:
    def __init__(self, module):
        self.parts = [nn.Tanh() for _ in range(70)] + [module]

    def __call__(self, x):
        for part in self.parts[68:]:
            x = part(x)
        return x


class InTable:
    def __init__(self, module):
        self.table = {"ab": Holder(module)}

    def __call__(self, x):
        return self.table["a" + "bc"[x.dim() - 2]].module(x)


@dataclasses.dataclass
class Data:
    module: nn.Module

    def __call__(self, x):
        return self.module(x)


Named = namedtuple("Named", "module")
OBJECTS = (
    *(Holder, Slots, AllEqual, ByProperty, ByMethod, ItsForward, ItsParts, ItsTensors, Weakly, InFunction, ByBoundMethod, ByPartial),
    *(InLongList, InTable, Data),
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.held, self.all, self.named = None, [], {}

    def forward(self, x):
        for part in self.all:
            x = part.module(x)
        for name in sorted(self.named):
            x = self.named[name](x)
        return x if self.held is None else self.held(x)


def objects(region, modules, kind):
    for module in modules:
        yield region(kind(module))


def arguments(region, modules, kind):
    run = region(lambda x, held: held(x))
    for module in modules:
        yield lambda x, module=module: run(x, kind(module))


def in_a_closure(region, modules, kind):
    def around(held):
        return region(lambda x: held(x) * 2)

    for module in modules:
        yield around(kind(module))


def in_one_closure(region, modules, kind):
    held = None
    run = region(lambda x: held(x) * 2)
    for module in modules:
        held = kind(module)
        yield run


def in_a_model(region, modules, kind):
    model = Model()
    run = region(model)
    for module in modules:
        model.held = kind(module)
        yield run


HELD = None


def in_a_global(region, modules, kind):
    global HELD
    run = region(lambda x: HELD(x) * 2)
    for module in modules:
        HELD = kind(module)
        yield run


def given_by_a_function(region, modules, kind):
    box = [None]

    def current():
        return box[0]

    run = region(lambda x: current()(x) * 2)
    for module in modules:
        box[0] = kind(module)
        yield run


CURRENT = contextvars.ContextVar("CURRENT")


def in_a_context(region, modules, kind):
    run = region(lambda x: CURRENT.get()(x) * 2)
    for module in modules:
        CURRENT.set(kind(module))
        yield run


def through_a_weak_reference(region, modules, kind):
    box = [None]
    run = region(lambda x: box[0]()(x) * 2)
    for module in modules:
        held = kind(module)
        box[0] = weakref.ref(held) if kind.__weakrefoffset__ else lambda held=held: held
        yield run


def in_a_class(region, modules, kind):
    class Settings:
        held = None

    run = region(lambda x: Settings.held(x) * 2)
    for module in modules:
        Settings.held = kind(module)
        yield run


def in_a_registry(region, modules, kind):
    registry = {}
    run = region(lambda x, name: registry[name](x))
    for number, module in enumerate(modules):
        registry[number] = kind(module)
        yield lambda x, number=number: run(x, number)


def in_a_default(region, modules, kind):
    for module in modules:
        held = kind(module)

        def run(x, held=held):
            return held(x)

        yield region(run)


def in_a_loop(region, modules, kind):
    def run(x, held):
        for one in held.values():
            x = one(x)
        return x

    run = region(run)
    for module in modules:
        yield lambda x, module=module: run(x, {"one": kind(module)})


def deep_down(region, modules, kind):
    run = region(lambda x, outer: outer.middle.inner(x))
    for module in modules:
        outer = types.SimpleNamespace(middle=Holder(None))
        outer.middle.inner = kind(module)
        yield lambda x, outer=outer: run(x, outer)


WAYS = (
    *(objects, arguments, in_a_closure, in_one_closure, in_a_model, in_a_global, given_by_a_function, in_a_context, in_a_class),
    *(through_a_weak_reference, in_a_registry, in_a_default, in_a_loop, deep_down),
)


def methods(region, modules):
    for module in modules:
        yield region(Holder(module).through)


def methods_with_a_table(region, modules):
    class Trainer:
        def __init__(self):
            self.nets = {}

        def step(self, x, number):
            return self.nets[f"net {number}"](x)

    trainer = Trainer()
    run = region(trainer.step)
    for number, module in enumerate(modules):
        trainer.nets[f"net {number}"] = module
        yield lambda x, number=number: run(x, number)


def named_tuples(region, modules):
    run = region(lambda x, held: held.module(x))
    for module in modules:
        yield lambda x, module=module: run(x, Named(module))


def exchanged_in_an_object(region, modules):
    holder = Holder(None)
    run = region(holder)
    for module in modules:
        holder.module = module
        yield run


def exchanged_in_an_object_of_a_model(region, modules):
    model = Model()
    model.held = Holder(None)
    run = region(model)
    for module in modules:
        model.held.module = module
        yield run


def in_a_list_of_a_model(region, modules):
    model = Model()
    run = region(model)
    for module in modules:
        model.all = [Holder(module)]
        yield run


def added_to_a_list_of_a_model(region, modules):
    model = Model()
    run = region(model)
    for module in modules:
        model.all.append(Holder(module))
        yield run


def in_a_dictionary_of_a_model(region, modules):
    model = Model()
    run = region(model)
    for module in modules:
        model.named = {"one": module}
        yield run


def beside_the_modules_of_a_model(region, modules):
    model = Model()
    run = region(model)
    for module in modules:
        object.__setattr__(model, "held", module)
        yield run


def of_one_or_another_attribute(region, modules):
    class Either:
        first = second = None

        def __call__(self, x):
            held = self.first if self.second is None else self.second
            return held.module(x)

    either = Either()
    run = region(either)
    for number, module in enumerate(modules):
        either.first, either.second = Holder(module), Holder(module) if number % 2 else None
        yield run


def of_classes_of_their_own(region, modules):
    run = region(lambda x, held: held.module(x))
    for module in modules:

        class Own(Holder):
            pass

        held = Own(module)
        yield lambda x, held=held: run(x, held)


OTHER_WAYS = (
    *(methods, methods_with_a_table, named_tuples, exchanged_in_an_object, exchanged_in_an_object_of_a_model, in_a_list_of_a_model),
    *(added_to_a_list_of_a_model, in_a_dictionary_of_a_model, beside_the_modules_of_a_model, of_one_or_another_attribute),
    of_classes_of_their_own,
)
CASES = [
    *(
        pytest.param(functools.partial(way, kind=kind), id=f"{way.__name__}-{kind.__name__}")
        for way in WAYS
        for kind in OBJECTS
        if (way, kind) != (through_a_weak_reference, ItsTensors)  # no module runs there, and nothing leads to its tensors
    ),
    *(pytest.param(way, id=way.__name__) for way in OTHER_WAYS),
]


def train(region, reached):
    """The batch statistics show how often each module ran; between forward and backward some are switched to the other mode."""
    modules, seen = [block() for _ in range(4)], []
    for number, run in enumerate(reached(region, modules)):
        module = modules[number]
        for turn in range(1 if number == 1 else 4):
            x = torch.randn(3, 4, requires_grad=True)
            loss = run(x * 1).square().sum()
            if turn == 3 or number > 1:
                module.train(not module.training)
            loss.backward()
            seen += [x.grad, dict(module.named_buffers())]
    return seen + [p.grad for module in modules for p in module.parameters()]


@pytest.mark.parametrize("reached", CASES)
def test_modules_are_as_they_were(compare, reached):
    compare(functools.partial(train, reached=reached))
