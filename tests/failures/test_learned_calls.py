"""A region whose calls have gone the same way for a while still notices everything that it noticed in its first call."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import lowtide
from lowtide.errors import InputChangedError, ReplayMismatchError

WARM = 3


class Block(nn.Module):
    """Has everything that the guards look at: a branch, an attribute, a training flag, a chance to draw, a buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("shift", torch.zeros(4))
        self.scale = 1.0
        self.act = F.gelu
        self.writes = False

    def forward(self, x, twice=False):
        if self.writes:
            x.add_(1)
        h = self.up(self.norm(x) * self.scale + self.shift)
        out = x + self.down(self.drop(self.act(h)))
        return out * 2 if twice else out


class WritingBlock(Block):
    """Besides, it writes to buffers: to one that it reads as well, and to statistics."""

    def __init__(self):
        super().__init__()
        self.stats = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x, twice=False):
        out = super().forward(x, twice)
        self.mean.mul_(0.5).add_(out.detach().reshape(-1, 4).mean(0))
        return (out if out.dim() > 2 else self.stats(out)) * self.mean.clone()


BLOCKS = [Block, WritingBlock]


def inputs():
    return (torch.randn(3, 4, requires_grad=True) * 1,)


def step(run, *args, **kwargs):
    run(*args, **kwargs).square().sum().backward()


@pytest.mark.parametrize("kind", BLOCKS)
def test_calls_after_the_first_go_the_short_way_and_so_do_their_replays(steadily, kind):
    run = lowtide.checkpoint(kind())
    for _ in range(WARM):
        step(run, *inputs())
    assert steadily == {"calls": WARM - 1, "replays": WARM - 1}


@pytest.fixture(params=BLOCKS)
def varied(compare, request):
    """``varied(vary)`` compares runs in which, after some steps, ``vary(run, block)`` does something new and returns what to compare."""

    def compare_varied(vary, **options):
        def scenario(region):
            block = request.param()
            run = region(block)
            for _ in range(WARM):
                step(run, *inputs())
            block.zero_grad()
            found = vary(run, block)
            for _ in range(2):
                step(run, *inputs())
            return [found, [p.grad for p in block.parameters()], dict(block.named_buffers())]

        compare(scenario, **options)

    return compare_varied


def test_a_module_flipped_before_backward(varied):
    def vary(run, block):
        block.drop.p = 0.5
        (x,) = inputs()
        loss = run(x).square().sum()
        block.eval()
        loss.backward()
        block.train()

    varied(vary)


def test_a_module_in_another_mode(varied):
    def vary(run, block):
        block.drop.p = 0.5
        block.eval()
        step(run, *inputs())

    varied(vary)


def test_an_attribute_changed_before_backward(varied):
    def vary(run, block):
        loss = run(*inputs()).square().sum()
        block.scale = 3.0
        loss.backward()

    varied(vary)


def test_an_attribute_changed_between_calls(varied):
    def vary(run, block):
        block.scale, block.act = 3.0, torch.tanh
        step(run, *inputs())

    varied(vary)


def test_a_module_that_begins_to_draw(varied):
    def vary(run, block):
        block.drop.p = 0.5
        loss = run(*inputs()).square().sum()
        torch.rand(3)
        loss.backward()

    varied(vary)


def test_a_module_that_begins_to_draw_one_sample_of_two(varied):
    class Noise(nn.Module):
        def forward(self, x):
            return x * torch.randn(1)

    def vary(run, block):
        block.drop = Noise()
        torch.randn(1)  # makes a second sample in advance, which the region uses up without the generator moving
        loss = run(*inputs()).square().sum()
        torch.randn(1)
        loss.backward()

    varied(vary)


def test_a_module_that_draws_a_full_round(compare):
    def scenario(region):
        drop = nn.Dropout(0.0)
        run = region(drop)
        for _ in range(WARM):
            step(run, torch.randn(624, 4, requires_grad=True) * 1)
        drop.p = 0.5
        x = torch.randn(624, 4, requires_grad=True)
        loss = run(x * 1).square().sum()
        torch.rand(5)
        loss.backward()
        return x.grad

    compare(scenario)


def test_parameters_swapped_for_the_call(varied):
    def vary(run, block):
        other = {name: (p.detach() + 1).requires_grad_() for name, p in block.named_parameters()}
        holder = nn.Module()
        holder.block = block
        holder.forward = lambda x: run(x)  # noqa: PLW0108 – a module would be taken for a module in it
        loss = functional_call(holder, {f"block.{name}": p for name, p in other.items()}, inputs()).square().sum()
        loss.backward()
        return [p.grad for p in other.values()]

    varied(vary)


def test_a_module_exchanged(varied):
    def vary(run, block):
        del block.down
        gc.collect()
        block.down = nn.Linear(8, 4)
        step(run, *inputs())
        return [p.grad for p in block.down.parameters()]

    varied(vary)


def test_an_exchanged_module_is_let_go_of():
    block = Block()
    run = lowtide.checkpoint(block)
    for _ in range(WARM):
        step(run, *inputs())
    gone = weakref.ref(block.shift)
    block.shift = torch.ones(4)
    assert gone() is None


def test_other_arguments(varied):
    def vary(run, block):
        step(run, *inputs(), True)
        step(run, *inputs(), twice=True)
        step(run, torch.randn(2, 5, 4, requires_grad=True) * 1)
        step(run, torch.randn(3, 4))

    varied(vary)


def test_frozen_parameters(varied):
    def vary(run, block):
        block.up.requires_grad_(False)
        step(run, *inputs())
        block.up.requires_grad_()

    varied(vary)


def test_parameters_frozen_before_backward(varied):
    def vary(run, block):
        loss = run(*inputs()).square().sum()
        block.up.requires_grad_(False)
        loss.backward()
        block.up.requires_grad_()

    varied(vary)


@pytest.mark.parametrize("retain", [False, True])
def test_two_backwards_and_partial_ones(varied, retain):
    def vary(run, block):
        (x,) = inputs()
        y = run(x)
        (one,) = torch.autograd.grad(y[0].sum(), x, retain_graph=True)
        two = torch.autograd.grad(y.square().sum(), [x, block.up.weight], retain_graph=retain)
        return [one, two, torch.autograd.grad(y.sum(), x) if retain else None]

    varied(vary)


def test_a_buffer_replaced_before_backward(varied):
    def vary(run, block):
        loss = run(*inputs()).square().sum()
        block.shift = torch.ones(4)
        if isinstance(block, WritingBlock):
            block.mean = torch.full((4,), 3.0)
        loss.backward()

    varied(vary)


def test_a_buffer_replaced_between_calls(varied):
    def vary(run, block):
        block.shift = torch.ones(4)
        if isinstance(block, WritingBlock):
            block.mean = torch.full((4,), 3.0)
        step(run, *inputs())

    varied(vary)


def test_calls_go_on_before_backward(varied):
    def vary(run, block):
        losses = [run(*inputs()).square().sum() for _ in range(3)]
        for loss in losses[1:] + losses[:1]:
            loss.backward()

    varied(vary)


def test_hooks_registered_between_calls_and_before_backward(varied):
    def vary(run, block):
        handle = block.up.register_forward_hook(lambda module, args, output: output * 2)
        step(run, *inputs())
        handle.remove()
        loss = run(*inputs()).square().sum()
        handle = block.up.register_forward_pre_hook(lambda module, args: args[0] * 3)
        loss.backward()
        handle.remove()

    varied(vary)


def test_a_step_without_gradients_and_one_in_evaluation(varied):
    def vary(run, block):
        with torch.no_grad():
            run(*inputs())
        block.eval()
        step(run, *inputs())
        block.train()
        with torch.inference_mode():
            return [run(torch.ones(3, 4)).clone()]

    varied(vary)


def test_higher_order_gradients(varied):
    def vary(run, block):
        (x,) = inputs()
        (grad,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    varied(vary)


def test_surroundings(varied):
    def vary(run, block):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(*inputs()).float().square().sum()
        loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            step(lambda x: run(x).float(), *inputs())

    varied(vary)


def test_hooks_around(varied):
    def vary(run, block):
        held = []

        def pack(tensor):
            held.append(tensor.clone())
            return len(held) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, held.__getitem__):
            loss = run(*inputs()).square().sum()
        loss.backward()

    varied(vary)


def test_a_region_that_begins_to_write_to_its_input():
    block = Block()
    run = lowtide.checkpoint(block)
    for _ in range(WARM):
        step(run, *inputs())
    block.writes = True
    loss = run(*inputs()).square().sum()
    with pytest.raises(lowtide.errors.ReplayError, match="wrote to its input argument 0"):
        loss.backward()
    step(run, *inputs())


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda block, x: x.mul_(2), "input argument 0"),
        (lambda block, x: block.up.bias.mul_(2), "up.bias"),
        (lambda block, x: block.shift.add_(1), "shift"),
    ],
)
def test_what_is_changed_in_place_before_backward_is_named(change, name, kind):
    block = kind()
    run = lowtide.checkpoint(block)
    for _ in range(WARM):
        step(run, *inputs())
    (x,) = inputs()
    loss = run(x).square().sum()
    with torch.no_grad():
        change(block, x)
    with pytest.raises(InputChangedError, match=name):
        loss.backward()
    step(run, *inputs())


def test_buffers_that_a_call_writes_to_may_change_before_backward(compare):
    def scenario(region):
        block = WritingBlock()
        run = region(block)
        for _ in range(WARM):
            step(run, *inputs())
        loss = run(*inputs()).square().sum()
        with torch.no_grad():
            block.mean.zero_()
        loss.backward()
        return [[p.grad for p in block.parameters()], dict(block.named_buffers())]

    compare(scenario)


HIDDEN_WAYS = []


class Switch(nn.Module):
    """Goes another way for reasons that no guard sees; both ways save as many tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        h = self.linear(x)
        ways = globals()["HIDDEN_WAYS"]  # not by its name: no guard is to see it
        way = ways.pop() if ways else "sin"
        if way == "short":
            h = h[:1]
        return torch.sin(h.double() if way == "double" else h)


@pytest.mark.parametrize("way", ["short", "double"])
def test_a_replay_that_differs_in_shape_or_dtype_is_an_error(way):
    switch = Switch()
    run = lowtide.checkpoint(switch)
    for _ in range(WARM):
        step(run, torch.randn(3, 4, requires_grad=True))
    loss = run(torch.randn(3, 4, requires_grad=True)).sum()
    HIDDEN_WAYS.extend([way] * 3)
    with pytest.raises(ReplayMismatchError, match="did not do what its forward did"):
        loss.backward()
    HIDDEN_WAYS.clear()
    step(run, torch.randn(3, 4, requires_grad=True))


def test_another_thread_draws_meanwhile():
    drop = nn.Dropout(0.5)
    run = lowtide.checkpoint(drop)
    for _ in range(WARM):
        step(run, torch.randn(3, 4, requires_grad=True) * 1)
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        x = torch.randn(8, requires_grad=True)
        y = run(x * 1)
        y.sum().backward()
    finally:
        stop.set()
        other.join()
    assert torch.equal(x.grad != 0, y.detach() != 0)


def test_nothing_is_left_for_the_garbage_collector():
    run = lowtide.checkpoint(Block())
    for _ in range(WARM):
        step(run, *inputs())
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(20):
            step(run, *inputs())
        assert len(gc.get_objects()) - before < 5
    finally:
        gc.enable()
