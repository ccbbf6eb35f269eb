"""Sequences in segments of equal cost: any inputs and outputs, and the gradients of the plain sequence bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowtide
from lowtide.errors import InvalidInputError
from lowtide.policy._sequential import split


class Block(nn.Module):
    """As wide inside as it is told to be."""

    def __init__(self, inside=8):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, inside), nn.BatchNorm1d(inside), nn.Tanh(), nn.Dropout(0.3), nn.Linear(inside, 8))

    def forward(self, x):
        return x + self.body(x)


def blocks(widths=(8,) * 6):
    torch.manual_seed(2)
    return [Block(width) for width in widths]


def train(run, modules, steps=4):
    torch.manual_seed(4)
    found = []
    for _ in range(steps):
        for module in modules:
            module.zero_grad()
        x = torch.randn(5, 8, requires_grad=True)
        run(x).square().sum().backward()
        found.append(x.grad)
        for module in modules:
            found += [parameter.grad.clone() for parameter in module.parameters()] + [buffer.clone() for buffer in module.buffers()]
    return [*found, torch.get_rng_state()]


def same(found, expected):
    return len(found) == len(expected) and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def plain():
    parts = blocks()
    return train(nn.Sequential(*parts), parts)


@pytest.mark.parametrize("options", [{}, {"segments": 3}, {"costs": [1, 2, 3, 4, 5, 6]}, {"replay_last": False}], ids=str)
def test_gradients_and_buffers_are_those_of_the_plain_sequence(plain, options):
    parts = blocks()
    assert same(train(lowtide.checkpoint_sequential(nn.Sequential(*parts), **options), parts), plain)


def test_segments_are_balanced_by_what_their_parts_save():
    parts = blocks((8, 8, 8, 8, 256, 8))
    run = lowtide.checkpoint_sequential(parts, segments=3)
    assert run.segments() is None
    run(torch.randn(5, 8, requires_grad=True)).sum().backward()
    assert run.segments() == ((0, 4), (4, 5), (5, 6))


def test_all_are_replayed_once_and_the_last_segment_too_unless_it_is_left_out():
    for replay_last, last in ((True, [False, True]), (False, [False])):
        parts = blocks()
        calls = [[] for _ in parts]
        for part, log in zip(parts, calls, strict=True):
            part.body[1].register_forward_pre_hook(lambda *_, log=log: log.append(lowtide.is_replaying()))
        run = lowtide.checkpoint_sequential(parts, segments=3, costs=[1] * 6, replay_last=replay_last)
        run(torch.randn(5, 8)).sum().backward()
        assert calls == [[False, True]] * 4 + [last] * 2


def test_inputs_and_outputs_may_be_anything():
    def first(x, /, *, scale, options):
        return {"x": x * scale + options["shift"], "skip": (x, [scale])}

    def middle(state):
        return state["x"].tanh(), state["skip"]

    def last(state):
        return {"out": state[0] * state[1][0].exp(), "scale": state[1][1][0]}

    x, scale, shift = (torch.randn(4, requires_grad=True) for _ in range(3))
    found = []
    for run in (lambda *a, **k: last(middle(first(*a, **k))), lowtide.checkpoint_sequential([first, middle, last], segments=2)):
        for _ in range(3):
            out = run(x, scale=scale, options={"shift": shift})
            found.append(torch.autograd.grad(out["out"].sum() * out["scale"].sum(), (x, scale, shift)))
    assert all(same(one, other) for one, other in itertools.combinations(found, 2))


def test_sequences_in_sequences(plain):
    parts = blocks()
    inner = lowtide.checkpoint_sequential(parts[1:5], segments=2)
    assert same(train(lowtide.checkpoint_sequential([parts[0], inner, parts[5]], segments=2), parts), plain)


def test_inside_a_region_that_is_replayed_after_the_segments_were_found(plain):
    """The first call goes part by part, and so has its replay to, although segments are known by then."""
    parts = blocks()
    run = lowtide.checkpoint_sequential(parts, segments=2)
    assert same(train(lowtide.checkpoint(run), parts), plain)
    assert run.segments() is not None


def test_two_forwards_before_the_first_backward():
    parts = blocks()
    run = lowtide.checkpoint_sequential(parts, segments=2)
    around = lowtide.checkpoint(run)
    found = []
    for call in (nn.Sequential(*blocks()), None):
        torch.manual_seed(1)
        x, y = torch.randn(5, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
        one, other = (call or around)(x), (call or around)(y)
        (one.sum() + other.square().sum()).backward()
        found.append([x.grad, y.grad])
    assert same(*found)


def test_without_gradients_nothing_is_measured():
    parts = blocks()
    run = lowtide.checkpoint_sequential(parts)
    with torch.no_grad():
        run(torch.randn(5, 8))
    assert run.segments() is None


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 5))
def test_the_largest_segment_is_as_small_as_can_be(costs, segments):
    found = split(costs, segments)
    assert [start for start, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == len(costs)
    assert len(found) <= segments
    cuts = itertools.chain.from_iterable(itertools.combinations(range(1, len(costs)), count) for count in range(min(segments, len(costs))))
    best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise([0, *cut, len(costs)])) for cut in cuts)
    assert max(sum(costs[a:b]) for a, b in found) == best


@pytest.mark.parametrize(
    ("functions", "options"),
    [([], {}), ([1], {}), ([torch.sin], {"segments": 0}), ([torch.sin], {"costs": [1, 2]}), ([torch.sin], {"costs": [-1]})],
)
def test_what_makes_no_sense_is_refused(functions, options):
    with pytest.raises(InvalidInputError):
        lowtide.checkpoint_sequential(functions, **options)
