"""Regions installed in place: nothing about the model changes but its memory, and everything can be put back."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import lowtide
from lowtide.engine import explain, install
from lowtide.errors import AlreadyAppliedError, InvalidInputError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return x + scale * self.mlp(self.norm(x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def gradients(model, steps=3):
    torch.manual_seed(1)
    seen = []
    for _ in range(steps):
        x = torch.randn(2, 3, 8, requires_grad=True)
        model.zero_grad()
        model(x).square().sum().backward()
        seen += [x.grad, *(p.grad.clone() for p in model.parameters())]
    return seen


def identical(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def members(model):
    return [(str(index), block) for index, block in enumerate(model)]


class WithRegion(nn.Module):
    """A block that is replayed by its own."""

    def __init__(self, block):
        super().__init__()
        self.run = lowtide.checkpoint(block)

    def forward(self, x):
        return self.run(x)


def test_segments_around_regions_and_inside_another_region(model):
    # In a replay of the outermost region nobody goes backward through what is inside: nothing but the replay holds a segment's frame.
    plain = gradients(copy.deepcopy(model))
    blocks = nn.Sequential(*map(WithRegion, model))
    segments = [install(members(blocks)[i : i + 2]) for i in (0, 2)]
    whole = lowtide.checkpoint(blocks)
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        x = torch.randn(2, 3, 8, requires_grad=True)
        model.zero_grad()
        whole(x).square().sum().backward()
        seen += [x.grad, *(p.grad.clone() for p in model.parameters())]
    assert identical(seen, plain)
    assert all(segment.replay_seconds() for segment in segments)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_gradients_and_attributes_are_those_of_the_plain_model(model, length):
    plain = gradients(copy.deepcopy(model))
    pairs = members(model)
    handles = [install(pairs[start : start + length]) for start in range(0, 4, length)]
    assert identical(gradients(model), plain)
    assert [block.calls for block in model] == [3] * 4
    assert all(handle.replay_seconds() > 0 for handle in handles)


def test_nothing_but_an_instance_attribute_is_added_and_remove_takes_it_away(model):
    before = list(model.state_dict()), [type(m) for m in model.modules()], [dict(m.__dict__) for m in model.modules()]
    handle = install(members(model))
    assert list(model.state_dict()) == before[0]
    assert [type(m) for m in model.modules()] == before[1]
    assert inspect.signature(model[0].forward) == inspect.signature(Block.forward.__get__(model[0]))
    handle.remove()
    handle.remove()
    assert [dict(m.__dict__) for m in model.modules()] == before[2]


def test_what_was_installed_before_by_others_comes_back(model):
    other = model[0].forward
    model[0].forward = other
    handle = install(members(model)[:1])
    assert identical(gradients(model), gradients(model))
    handle.remove()
    assert model[0].__dict__["forward"] is other


def test_a_second_region_on_a_module_is_refused_and_changes_nothing(model):
    install(members(model)[1:2])
    with pytest.raises(AlreadyAppliedError, match="'1'"):
        install(members(model)[:2])
    assert "forward" not in model[0].__dict__


@pytest.mark.parametrize("wrong", [[], [("a", 0), ("b", 0)]])
def test_no_module_or_one_twice_is_refused(model, wrong):
    with pytest.raises(InvalidInputError):
        install([(path, model[index]) for path, index in wrong])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("length", [1, 2])
def test_a_duplicate_has_regions_of_its_own(model, duplicate, length):
    plain = gradients(copy.deepcopy(model))
    for start in range(0, 4, length):
        install(members(model)[start : start + length])
    other = duplicate(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert identical(gradients(other), plain)
    assert model[0].calls == 0
    assert other[0].forward.segment is not model[0].forward.segment


def test_a_disabled_region_does_nothing(model):
    handle = install(members(model))
    gradients(model)
    spent = handle.replay_seconds()
    with handle.disabled():
        gradients(model)
        assert not handle.enabled
    assert handle.enabled
    assert handle.replay_seconds() == spent


def test_members_called_in_another_order_are_regions_of_their_own(model):
    plain = copy.deepcopy(model)
    install(members(model))
    for net in (plain, model):
        torch.manual_seed(3)
        x = torch.randn(2, 8)
        (net[2](net[1](net[0](x))) + net[0](x) * net[3](x)).sum().backward()
    assert identical([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_code_between_members_is_not_replayed_and_what_it_makes_is_held(model):
    plain = copy.deepcopy(model)
    install(members(model)[:2])
    glue = []
    for net in (plain, model):
        torch.manual_seed(3)
        h = net[0](torch.randn(2, 8))
        glue.append(1)
        y = torch.sin(h)
        net[1](y + h, scale=h).sum().backward()
    assert len(glue) == 2
    assert identical([p.grad for p in model.parameters() if p.grad is not None], [p.grad for p in plain.parameters() if p.grad is not None])


def test_what_a_member_returned_and_was_changed_in_place_is_held(model):
    plain = copy.deepcopy(model)
    install(members(model)[:2])
    for net in (plain, model):
        torch.manual_seed(3)
        h = net[0](torch.randn(2, 8))
        h.mul_(2)
        net[1](h).square().sum().backward()
    assert identical([p.grad for p in model[:2].parameters()], [p.grad for p in plain[:2].parameters()])


def test_a_dropped_model_is_freed_without_the_garbage_collector(model):
    install(members(model)[:2])
    gradients(model)
    ref = weakref.ref(model[0])
    gc.disable()
    try:
        del model[:]
        assert ref() is None
    finally:
        gc.enable()


def test_explain_lists_what_was_learned(model):
    handle = install(members(model)[:1])
    names = " ".join(guard.name for guard in explain(handle))
    assert "calls" not in names
    gradients(model)
    guards = explain(model[0])
    assert any("attributes calls" in guard.name for guard in guards)
    assert any("parameters" in guard.name and guard.seconds > 0 for guard in guards)
    assert all(guard.why for guard in guards)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_model_is_one_graph_in_which_the_compiler_replays_the_region(model):
    block = model[1].mlp.eval()
    handle = install([("1.mlp", block)])
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: torch.sin(block(x)), backend=backend, fullgraph=True)
    x = torch.randn(3, 8)
    compiled(x).sum().backward()
    found = [parameter.grad for parameter in block.parameters()]
    marked = [node for node in backend.graphs[0].graph.nodes if node.target is torch.ops.higher_order.tag_activation_checkpoint]
    handle.remove()
    block.zero_grad()
    torch.sin(block(x)).sum().backward()
    assert len(marked) == 1
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(found, block.parameters(), strict=True))
    torch._dynamo.reset()
