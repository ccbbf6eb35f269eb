"""What is in modules is not looked for again as long as nothing in their dictionaries changes; whatever changes there is noticed."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.engine import _acceleration, checkpoint
from lowtide.engine._guards import _modules
from lowtide.engine._guards._modules import Watch
from lowtide.engine._profile import profile_of
from lowtide.errors import InputChangedError

SIZE = 4
native = _acceleration.native
needs_settled = pytest.mark.skipif(
    native is None or native.Settled is None, reason="the engine was not compiled here, or dicts have no numbers"
)


class _Count:
    next_id = 0


class _Own:
    """Something with attributes."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bare, self.norm = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False), nn.BatchNorm1d(SIZE)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.bare(torch.relu(self.linear(x))))) * self.scale


def _settled(dicts: list[Any], tables: list[Any], tensors: list[Any], settings: list[Any], flags: list[bool]) -> Any:
    assert native is not None
    made = native.Settled([*tables, *dicts], len(tables), _Count, flags, [])
    assert made.fill(tensors, settings)
    return made


def _set(table: Any) -> None:
    table["a"] = object()


def _rename(table: Any) -> None:
    table["z"] = table.pop("a")


def _clear_and_fill(table: Any) -> None:
    content = dict(table)
    table.clear()
    table.update(content, a=object())


CHANGES: list[Callable[[Any], object]] = [
    *(_set, _rename, _clear_and_fill),
    *(lambda table: table.update(b=1), lambda table: table.pop("a"), lambda table: table.setdefault("b"), lambda table: table.popitem()),
    *(lambda table: table.clear(), lambda table: table.__delitem__("a"), lambda table: table.__ior__({"a": object()})),
]


@needs_settled
@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_in_a_dictionary_is_noticed(kind: type, change: Callable[[Any], object]) -> None:
    value = object()
    table = kind(a=value)
    settled = _settled([table], [], [], [value], [])
    assert settled.has([], [], [], [value])
    change(table)
    assert not settled.has([], [], [], [value])
    assert settled.read([]) is None


@needs_settled
@pytest.mark.parametrize("times", [1, 50])
def test_attributes_of_objects_that_change_are_noticed_also_once_the_code_is_specialized(times: int) -> None:
    def store(target: Any, value: object) -> None:
        target.a = value

    for _ in range(times):
        owner = _Own()
        store(owner, 1)
        settled = _settled([vars(owner)], [], [], [], [])
        assert settled.has([], [], [], [])
        store(owner, 2)
        assert not settled.has([], [], [], [])
        settled = _settled([vars(owner)], [], [], [], [])
        del owner.a
        assert not settled.has([], [], [], [])


@needs_settled
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_in_a_table_is_noticed(change: Callable[[Any], object]) -> None:
    tensor = torch.ones(2)
    before, table, after = {"b": torch.zeros(1), "c": None}, {"a": tensor}, {"d": torch.zeros(2).add_(1)}
    tensors = [before["b"], None, tensor, after["d"]]
    settled = _settled([], [before, table, after], tensors, [], [True])
    versions = [0, -1, 0, 1]
    for _ in range(2):
        assert settled.read([True])[:3] == (tensors, versions, [True])
        table["a"] = torch.zeros(3)
        assert settled.read([True]) is None
        table["a"] = tensor  # a replay puts back what was there
    if change is not _rename:  # under another name the same tensors are there
        change(table)
        assert settled.read([True]) is None
        assert not settled.has(tensors, [], [True], [])


@needs_settled
def test_what_is_not_as_it_was_then_is_told_apart() -> None:
    tensors, setting = [torch.ones(1), torch.ones(1)], object()
    table = dict(enumerate(tensors))
    settled = _settled([{"a": setting}], [table], tensors, [setting], [True, False])
    then = (tensors, [], [True, False], [setting])
    assert settled.has(*then)
    other = [tensors[0], torch.ones(1)]
    for place, values in ((0, other), (0, tensors[:1]), (2, [True, True]), (2, [True]), (3, [object()]), (3, [])):
        assert not settled.has(*then[:place], values, *then[place + 1 :])
    assert settled.has(other, [1], *then[2:])
    assert not settled.has(other, [0], *then[2:])
    assert settled.read([True, True]) is None
    _Count.next_id += 1
    try:
        assert not settled.has(*then)
        assert settled.read([True, False]) is None
    finally:
        _Count.next_id -= 1
    assert settled.has(*then)


@needs_settled
def test_what_was_read_too_early_is_not_taken() -> None:
    assert native is not None
    table = {"a": torch.ones(1)}
    made = native.Settled([table], 1, _Count, [], [])
    assert made.read([]) is None
    assert not made.has([], [], [], [])
    there = [*table.values()]
    table["a"] = torch.ones(1)
    assert not made.fill(there, [])
    assert made.read([]) is None
    with pytest.raises(ValueError, match="1 tensors"):
        native.Settled([table], 1, _Count, [], []).fill([], [])


@needs_settled
def test_nothing_is_kept_alive_or_left_behind() -> None:
    table: dict[str, Any] = {"a": torch.ones(1)}
    own: dict[str, Any] = {"b": _Own()}
    flags, listed = [True], [[*table.values()], [*own.values()]]
    watched = [table["a"], own["b"], table, own, flags]

    def use() -> None:
        settled = _settled([own], [table], *listed, flags)
        for _ in range(3):
            assert settled.read(flags)[3] == listed[1]
            assert settled.has(*listed[:1], [], flags, listed[1])
            table["a"] = None
            assert settled.read(flags) is None
            table["a"] = listed[0][0]
        assert settled.has(*listed[:1], [], flags, listed[1])
        assert settled.fill(*listed) is True

    use()
    gc.collect()
    before = [sys.getrefcount(value) for value in watched]
    for _ in range(50):
        use()
    gc.collect()
    assert [sys.getrefcount(value) for value in watched] == before
    settled = _settled([own], [table], *listed, flags)
    gone = [*map(weakref.ref, (table["a"], own["b"]))]
    watched.clear()
    listed.clear()
    own.clear()
    del table["a"]
    assert [ref() for ref in gone] == [None, None]
    assert settled.read(flags) is None


@needs_settled
def test_cycles_through_it_are_collected() -> None:
    table: dict[str, Any] = {"value": _Own()}
    table["settled"] = _settled([table], [], [], [], [])
    gone = weakref.ref(table["value"])
    del table
    gc.collect()
    assert gone() is None


@needs_settled
@pytest.mark.parametrize(
    "call",
    [
        lambda n: n.Settled({}, 0, _Count, [], []),
        lambda n: n.Settled([1], 0, _Count, [], []),
        lambda n: n.Settled([{}], 0, _Count, None, []),
        lambda n: n.Settled([], 0, _Count, [], []).read(None),
        lambda n: n.Settled([], 0, _Count, [], []).has([], [], []),
        lambda n: n.Settled([], 0, _Count, [], []).has([], [], [], ()),
        lambda n: n.Settled([], 0, _Count, [], []).fill((), []),
    ],
)
def test_what_it_cannot_take_is_an_error(call: Any) -> None:
    with pytest.raises(TypeError):
        call(native)


@needs_settled
def test_a_number_of_tables_that_there_are_not_is_an_error() -> None:
    assert native is not None
    for tables in (-1, 2):
        with pytest.raises(IndexError):
            native.Settled([{}], tables, _Count, [], [])
    with pytest.raises(AttributeError):
        native.Settled([{}], 1, object(), [], [])


def _swap_weight(block: Block) -> None:
    block.linear.weight = nn.Parameter(torch.ones(SIZE, SIZE))


def _hook(block: Block) -> None:
    block.linear.register_forward_hook(lambda *_: None)


def _leave_as_it_is(block: Block) -> None:
    pass


def _exchange(block: Block) -> None:
    block._modules["linear"] = nn.Linear(SIZE, SIZE)


STEPS: list[Callable[[Block], object]] = [
    _leave_as_it_is,
    lambda block: block.linear.weight.mul_(2),
    lambda block: setattr(block, "scale", 3.0),
    lambda block: setattr(block, "new", 3.0),
    _swap_weight,
    lambda block: block.linear.register_parameter("more", nn.Parameter(torch.ones(1))),
    lambda block: block.bare.register_buffer("more", torch.ones(1)),
    lambda block: block.norm.register_module("more", nn.ReLU()),
    lambda block: setattr(block.norm, "momentum", 0.3),
    lambda block: block.eval(),
    lambda block: block.norm.eval(),
    lambda block: block.linear.weight.add_(1),
    _hook,
    _exchange,
]


def _shown(taken: Any) -> Any:
    """What was read, told by identity; of a buffer that calls write to there is a copy."""
    if taken is None:
        return None
    *settings, named = taken[3]
    shown = [*map(id, settings), *((id(own), name) for own, name in named)]
    return [[id(t) for t in taken[0][3:]], taken[1][3:], *taken[2:3], shown, *taken[4:]]


@pytest.mark.parametrize("change", STEPS)
def test_modules_are_read_as_they_are_without_it(monkeypatch: pytest.MonkeyPatch, change: Callable[[Block], object]) -> None:
    block = Block()
    watch = Watch(block)
    with monkeypatch.context() as patched:
        patched.setattr(_modules, "Settled", None)
        twin = Watch(block)
        flags = twin.training_now()
        then = twin.take_again(flags)
    watch.expect_writes()
    twin.expect_writes()
    seen = []
    for one in (watch, twin):
        with monkeypatch.context() as patched:
            if one is twin:
                patched.setattr(_modules, "Settled", None)
            taken = [one.take_again(flags) for _ in range(2)]
            seen.append([_shown(each) for each in taken])
    assert twin._settled is None
    assert then is not None
    assert seen[0] == seen[1]
    assert seen[0][0] is not None
    with torch.no_grad():
        change(block)
    for attributes in (True, False):
        assert watch.is_as(then, attributes=attributes) is twin.is_as(then, attributes=attributes)
    assert len(watch.rebound(then)) == len(twin.rebound(then))
    after = [_shown(watch.take_again(flags)), None]
    monkeypatch.setattr(_modules, "Settled", None)
    after[1] = _shown(twin.take_again(flags))
    assert after[0] == after[1]
    if change is not _leave_as_it_is:
        assert after[0] != seen[0][0]


def test_what_is_learned_of_a_module_is_not_passed_over() -> None:
    for note in (lambda watch, block: watch.note_changed(vars(block), "scale"), lambda watch, _: watch.note_state(torch.Generator())):
        block = Block()
        watch = Watch(block)
        flags = watch.training_now()
        assert watch.take_again(flags) is not None
        note(watch, block)
        assert watch.take_again(flags) is None


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)


def _steps(block: Block, change: Callable[[Block], object], region: Callable[..., Any]) -> list[torch.Tensor]:
    call, made = region(block), []
    for step in range(8):
        x = torch.linspace(-1, 1, 3 * SIZE).view(3, SIZE).mul(step + 1).requires_grad_()
        out = call(x)
        block.zero_grad()
        out.square().sum().backward()
        made += [out.detach(), x.grad, *(p.grad for p in block.parameters() if p.grad is not None), *map(torch.clone, block.buffers())]
        if step == 5:
            with torch.no_grad():
                change(block)
    return made


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("change", STEPS)
def test_gradients_are_those_of_plain_autograd_whatever_changes(change: Callable[[Block], object]) -> None:
    blocks = []
    for _ in range(2):
        torch.manual_seed(0)
        blocks.append(Block())
    torch.manual_seed(1)
    plain = _steps(blocks[0], change, lambda block: block)
    torch.manual_seed(1)
    ours = _steps(blocks[1], change, checkpoint)
    assert len(plain) == len(ours)
    assert all(map(torch.equal, plain, ours))


@pytest.mark.usefixtures("alone")
def test_layers_without_a_bias_go_the_short_way() -> None:
    layer = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.GELU(), nn.Linear(SIZE, SIZE, bias=False))
    call = checkpoint(layer)
    for _ in range(4):
        call(torch.ones(2, SIZE, requires_grad=True)).sum().backward()
    assert profile_of(layer).steady is not None
    out = call(torch.ones(2, SIZE, requires_grad=True))
    with torch.no_grad():
        layer[0].weight.add_(1)
    with pytest.raises(InputChangedError):
        out.sum().backward()
