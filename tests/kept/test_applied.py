"""Calls of autograd Functions are kept as those of functions are, whichever way they are written and called."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import lowtide
from lowtide import _torch_compiler as torch_compiler
from lowtide import policy as p
from lowtide.engine import checkpoint, kept_sites

from .conftest import Choose, assert_same, costly, costly_calls, snapshot

RAN = bytearray(1)
"""No list: a replay would see that, and put it back."""


class Classic(Function):
    """Has its context save an argument, a result, nothing, a view of an argument, and what was made inside."""

    @staticmethod
    def forward(ctx, x, scale):
        RAN[0] += 1
        inside = torch.cos(x)
        y = torch.sin(x) * scale
        ctx.scale = scale
        ctx.save_for_backward(x, None, y, inside, x.view(-1))
        return y

    @staticmethod
    def backward(ctx, grad):
        x, nothing, y, inside, flat = ctx.saved_tensors
        assert nothing is None
        return grad * inside * ctx.scale + 0 * (y + x) + 0 * flat.view_as(x), None


class Later(Function):
    """Is given its context when it is over. Can be differentiated twice."""

    @staticmethod
    def forward(x):
        RAN[0] += 1
        return torch.exp(x), torch.argsort(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        (y,) = ctx.saved_tensors
        return grad * y


class Marks(Function):
    """Marks a result that is a number as not differentiable, and calls functions inside."""

    @staticmethod
    def forward(ctx, x):
        RAN[0] += 1
        y, other = torch.tanh(torch.tanh(x)), torch.tanh(x)
        ctx.mark_non_differentiable(other)
        ctx.save_for_backward(x, other)
        return y, other

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        x, other = ctx.saved_tensors
        return grad * (1 - torch.tanh(other) ** 2) * (1 - torch.tanh(x) ** 2)


captured = Classic.apply


def _classic(x):
    return torch.exp(torch.tanh(Classic.apply(torch.sin(x), 0.5)))


def _captured(x):
    return torch.exp(torch.tanh(captured(torch.sin(x), 0.5)))


def _later(x):
    y, order = Later.apply(torch.sin(x))
    return torch.tanh(y) * torch.exp(y) + order


def _marks(x):
    y, other = Marks.apply(torch.sin(x))
    return torch.exp(torch.tanh(y)) * other


def _several(x):
    for _ in range(3):
        x = torch.tanh(Classic.apply(torch.sin(x), 0.5)) + torch.tanh(x)
    return torch.exp(x)


FUNCTIONS = (_classic, _captured, _later, _marks, _several)


def applied(*indices):
    return lambda site: isinstance(site.function, type) and (not indices or site.index in indices)


class Wrapper(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn, self.linear = fn, nn.Linear(4, 4)

    def forward(self, x):
        return self.fn(self.linear(x))


def steps(run, count=4, backward=lambda loss: loss.backward()):
    found = []
    for _ in range(count):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        loss = run(x * 1).square().sum()
        backward(loss)
        found.append(snapshot([loss, x.grad]))
    return found


def twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("backward", [lambda loss: loss.backward(), twice])
@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("in_module", [False, True])
def test_the_forward_is_not_run_again(fn, in_module, backward):
    torch.manual_seed(0)
    target = Wrapper(fn) if in_module else fn
    expected = steps(target, backward=backward)
    RAN[0] = 0
    steps(target, 1)
    calls = RAN[0]
    run = checkpoint(target, policy=Choose(applied()))
    assert_same(steps(run, backward=backward), expected)
    RAN[0] = 0
    assert_same(steps(run, backward=backward), expected)
    assert RAN[0] == 4 * calls
    assert "forward" in Classic.__dict__
    assert isinstance(Classic.__dict__["forward"], staticmethod)


def test_one_of_several_calls():
    expected = steps(_several)
    run = checkpoint(_several, policy=Choose(applied(1)))
    steps(run)
    RAN[0] = 0
    assert_same(steps(run), expected)
    assert RAN[0] == 4 * (3 + 2)


def test_gradients_of_gradients():
    def second(fn):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        (grad,) = torch.autograd.grad(fn(x * 1).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return snapshot([grad, x.grad])

    run = checkpoint(_later, policy=Choose(applied()))
    for _ in range(4):
        assert_same(second(run), second(_later))


def test_results_that_are_written_to_later():
    def fn(x):
        return torch.exp(Classic.apply(torch.sin(x), 0.5).mul(1).sin_() + Classic.apply(torch.cos(x), 2.0))

    def written(x):
        y, other = Marks.apply(torch.sin(x))
        other.add_(1)
        return torch.tanh(y) * torch.exp(y)

    assert_same(steps(checkpoint(fn, policy=Choose(applied()))), steps(fn))
    with torch.no_grad():
        assert written(torch.ones(2)) is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        steps(written, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        steps(checkpoint(written, policy=Choose(applied())), 1)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_inside_another_region_and_under_hooks(fn):
    inner = checkpoint(fn, policy=Choose(applied()))

    def plain(x):
        return torch.sin(fn(torch.cos(x)))

    def nested(x):
        return torch.sin(inner(torch.cos(x)))

    assert_same(steps(checkpoint(nested)), steps(plain))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)

    def hooked(x):
        with hooks:
            return nested(x)

    assert_same(steps(hooked), steps(plain))


def test_a_policy_names_it():
    run = lowtide.checkpoint(_classic, policy=p.keep(p.op(Classic)))
    assert_same(steps(run), steps(_classic))
    assert [site.function for site in kept_sites(run)] == [Classic]
    run = lowtide.checkpoint(_classic, policy=p.keep(p.op(captured)))
    steps(run)
    assert [site.function for site in kept_sites(run)] == [Classic]


def test_the_calls_inside_can_be_kept_too():
    run = checkpoint(_marks, policy=Choose(lambda site: getattr(site.function, "__name__", "") == "tanh"))
    assert_same(steps(run), steps(_marks))
    assert len(kept_sites(run)) == 4


def test_functions_that_are_called_in_a_kept_one_and_after_it(runs):
    class Calls(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return costly(x).clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.cos(ctx.saved_tensors[0]) * 2

    def fn(x):
        return torch.exp(torch.tanh(costly(torch.cos(Calls.apply(torch.sin(x))))))

    run = checkpoint(fn, policy=Choose(lambda site: applied()(site) or costly_calls(site)))
    assert_same(steps(run), steps(fn))
    assert [site.index for site in kept_sites(run)] == [0, 1]
    before = runs[0]
    steps(run)
    assert runs[0] - before == 4 * 2


def test_what_is_not_differentiable_is_not_so_in_the_replay():
    def fn(x):
        y, other = Marks.apply(torch.sin(x))
        return torch.exp(torch.tanh(y) * (2 if other.requires_grad else 3)) * torch.tanh(other)

    assert_same(steps(checkpoint(fn, policy=Choose(applied()))), steps(fn))


def test_a_function_that_is_one_op_is_asked_about_once():
    class Product(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.mm(x, x.t())

        @staticmethod
        def backward(ctx, grad):
            return (grad + grad.t()) @ ctx.saved_tensors[0]

    asked = Choose(lambda site: False)
    steps(checkpoint(lambda x: torch.exp(torch.tanh(Product.apply(torch.sin(x)))), policy=asked), 1)
    assert [site.function_name.rpartition(".")[2] for site in asked.asked] == ["sin", "Product", "tanh", "exp"]


class Derived(Classic):
    """Calls the forward of the class that it is derived from."""

    @staticmethod
    def forward(ctx, x, scale):
        return Classic.forward(ctx, x, scale) * 1


class Inherits(Classic):
    """Has its forward from there."""


def _called_by_c(x):
    return sum(torch.tanh(y) for y, _ in map(functools.partial(Later.apply), [torch.sin(x), torch.cos(x)]))


def _derived(x):
    y = Inherits.apply(torch.sin(x), 0.5) + Classic.apply(torch.cos(x), 2.0)
    return torch.exp(torch.tanh(Derived.apply(y, 0.25)))


@pytest.mark.parametrize(
    ("fn", "kept"), [(_called_by_c, [(Later, 0), (Later, 1)]), (_derived, [(Inherits, 0), (Classic, 0), (Derived, 0)])]
)
def test_calls_from_c_and_of_derived_classes(fn, kept):
    run = checkpoint(fn, policy=Choose(applied()))
    assert_same(steps(run), steps(fn))
    assert [(site.function, site.index) for site in kept_sites(run)] == kept
    RAN[0] = 0
    assert_same(steps(run), steps(fn))
    assert RAN[0] == 2 * 4 * len(kept)
    assert isinstance(Classic.__dict__["forward"], staticmethod)


def test_a_forward_that_is_called_as_a_function_is_one():
    class Context:
        def save_for_backward(self, *tensors):
            self.to_save = tensors

    def fn(x):
        return torch.exp(torch.tanh(Classic.apply(Classic.forward(Context(), torch.sin(x), 0.5), 2.0)))

    run = checkpoint(fn, policy=Choose(applied()))
    assert_same(steps(run), steps(fn))
    assert [site.index for site in kept_sites(run)] == [0]
    assert isinstance(Classic.__dict__["forward"], staticmethod)


def test_no_class_is_held_or_changed_by_being_looked_at():
    class Short(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    forward, gone = Short.__dict__["forward"], weakref.ref(Short)
    run = checkpoint(lambda x: torch.exp(torch.tanh(x)), policy=Choose(lambda site: True))
    steps(run)
    assert Short.__dict__["forward"] is forward
    assert "forward" not in Inherits.__dict__
    del Short, forward
    gc.collect()
    assert gone() is None


def test_the_compiler_may_be_imported_in_a_region(monkeypatch):
    def fn(x):
        monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", ModuleType("torch._dynamo.eval_frame"))  # as it begins
        return torch.exp(torch.tanh(_identity(x)))

    monkeypatch.setattr(torch_compiler, "_entry", [])
    assert_same(steps(checkpoint(fn, policy=Choose(applied()))), steps(fn))


def _identity(x):
    return x
