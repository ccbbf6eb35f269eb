"""What the compiled guards see is what their twins in Python see."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import _torch_compiler as torch_compiler
from lowtide.engine import _acceleration
from lowtide.engine._guards import _ambient, _modules, _unmodified

native: Any = _acceleration.native
pytestmark = pytest.mark.skipif(native is None, reason="the engine was not compiled here, or LOWTIDE_NATIVE=0 says so")


@pytest.fixture(scope="module")
def twins() -> dict[str, ModuleType]:
    """The modules as they are where nothing was compiled."""
    there, _acceleration.native = _acceleration.native, None
    try:
        return {module.__name__.rpartition(".")[2]: _loaded_anew(module) for module in (_ambient, _unmodified)}
    finally:
        _acceleration.native = there


def _loaded_anew(module: ModuleType) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_twin", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _compiled_by(callback: Any) -> Iterator[None]:
    before = torch_compiler.set_current(callback)
    try:
        yield
    finally:
        torch_compiler.set_current(before)


class _FunctionMode(TorchFunctionMode):
    """Does nothing."""


class _DispatchMode(TorchDispatchMode):
    """Does nothing."""


_AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "a default dtype": _default_dtype,
    "a function mode": _FunctionMode,
    "a dispatch mode": _DispatchMode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "another choice of attention": lambda: sdpa_kernel([SDPBackend.MATH]),
    "another order of attention": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "weights computed once": parametrize.cached,
    "no compiler": lambda: _compiled_by(False),
}


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("then", _AROUND)
def test_surroundings_are_told_apart_alike(twins: dict[str, ModuleType], then: str, attention: bool) -> None:
    twin = twins["_ambient"]
    with _AROUND[then]():
        ambient = _ambient.take_ambient(attention)
    assert _ambient.is_in_force is not twin.is_in_force
    told = {}
    for now in _AROUND:
        with _AROUND[now]():
            told[now] = _ambient.is_in_force(ambient), twin.is_in_force(ambient)
    assert [compiled for compiled, _ in told.values()] == [in_python for _, in_python in told.values()]
    if then == "nothing":
        unseen = {"nothing"} if attention else {"nothing", "another choice of attention", "another order of attention"}
        assert {now for now, (same, _) in told.items() if same} == unseen


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.drop, self.scale, self.label = nn.Dropout(0.5), 2.0, "a"


@pytest.mark.parametrize("change", ["nothing", "a parameter", "a buffer", "a loose tensor", "no tensor", "inference", "one less"])
def test_writes_are_seen_alike(twins: dict[str, ModuleType], change: str) -> None:
    model, still = _Model(), nn.Linear(2, 2)
    model.table = torch.zeros(2)
    watches = [_modules.Watch(still), _modules.Watch(model)]
    watches[1].find_loose()
    taken = [(watch, watch.take()) for watch in watches]
    then = taken[1][1]
    with torch.inference_mode():
        other = torch.zeros(2)
    with torch.no_grad():
        if change == "a parameter":
            model.first.weight.add_(1)
        elif change == "a buffer":
            model.norm.running_mean.add_(1)  # type: ignore[union-attr, operator]
        elif change == "a loose tensor":
            model.table.add_(1)
        elif change in ("no tensor", "inference"):
            then[0][0] = None if change == "no tensor" else other
        elif change == "one less":
            del then[1][-1]
    same = _unmodified.are_unmodified(taken)
    assert _unmodified.are_unmodified is native.are_unmodified
    assert same is twins["_unmodified"].are_unmodified(taken)
    assert same is (change == "nothing")


@pytest.mark.parametrize(("written", "still"), [([], True), ([0, 1], True), ([0, 2, 5], True), ([0, 1, 2], False), ([0, 1, 2, 5], False)])
def test_buffers_that_are_not_known_to_be_written_to_are_looked_at(written: list[int], still: bool) -> None:
    model = _Model()
    watch = _modules.Watch(model)
    watch.written = written
    taken = [(watch, watch.take())]
    assert _unmodified.are_in_place(taken, True)
    assert watch.has_still_buffers is still
    model.norm.running_mean.add_(1)  # type: ignore[union-attr, operator]
    assert _unmodified.are_in_place(taken, True) is (0 in written)
    watch.written = sorted({*written, 0, 1, 2})
    with torch.no_grad():
        model.first.bias.add_(1)
    assert _unmodified.are_in_place(taken, True)  # what a replay runs into is found when it is over
    assert not _unmodified.are_unmodified(taken)


def test_what_was_taken_is_not_held_by_looking() -> None:
    watch = _modules.Watch(_Model())
    then = watch.take()
    lists = [watch, then, *then, *then[0], [(watch, then)]]
    before = [sys.getrefcount(value) for value in lists]
    for _ in range(50):
        assert native.are_unmodified([(watch, then), (watch, (*then[:5], [(then[0][0], then[1][0], "a")]))])
        assert not native.are_unmodified([(watch, (then[0], [5] * len(then[1]), *then[2:]))])
        assert not native.are_unmodified([(watch, (*then[:5], [(then[0][0], 9, "a")]))])
    assert [sys.getrefcount(value) for value in lists] == before


def test_what_surrounds_is_not_held_by_looking() -> None:
    ambient = _ambient.take_ambient(True)
    watched = [*ambient, _ambient._get_flash, torch.get_default_dtype, True, False, 0]
    assert _ambient.is_in_force(ambient)
    before = [sys.getrefcount(value) for value in watched]
    for _ in range(50):
        assert _ambient.is_in_force(ambient)
        assert not _ambient.is_in_force((*ambient[:5], (False,) * 4, *ambient[6:]))
        assert not _ambient.is_in_force((*ambient[:6], [9], *ambient[7:]))
        assert not _ambient.is_in_force((*ambient[:2], (1,), *ambient[3:]))
    after = [sys.getrefcount(value) for value in watched]
    assert all(abs(now - then) < 25 for now, then in zip(after, before, strict=True))  # one a round would be 50; others may hold None


def _fails() -> Any:
    raise KeyError("failed")


def test_what_a_getter_raises_is_passed_on() -> None:
    ambient = (None, torch.float32, (), (), None, (True,) * 4, [], None, None)
    fine: list[Callable[[], Any]] = [lambda: None, *[lambda: 0] * 3, lambda: torch.float32, list, *[lambda: True] * 4]
    assert native.Surroundings(tuple(fine), {"a": 0}, "a", None).are(ambient)
    assert not native.Surroundings(tuple(fine), {"a": 1}, "a", None).are(ambient)
    assert not native.Surroundings(tuple(fine), {}, "a", None).are(ambient)
    for place in range(len(fine)):
        getters = [*fine[:place], _fails, *fine[place + 1 :]]
        with pytest.raises(KeyError):
            native.Surroundings(tuple(getters), {"a": 0}, "a", None).are(ambient)


_TAKEN: tuple[list[Any], ...] = ([], [], [], [], [], [])


@pytest.mark.parametrize(
    "call",
    [
        lambda n: n.are_unmodified(()),
        lambda n: n.are_unmodified([(None, _TAKEN[1:])]),
        lambda n: n.are_unmodified([(None, (*_TAKEN[:5], ()))]),
        lambda n: n.are_unmodified([_TAKEN]),
        lambda n: n.are_unmodified([(None, (*_TAKEN[:5], [(1, 2)]))]),
        lambda n: n.Surroundings((), {}, "a", None),
        lambda n: n.Surroundings((int,) * 10, [], "a", None),
        lambda n: n.Surroundings((int,) * 10, {}, "a", None).are([]),
        lambda n: n.Surroundings((int,) * 10, {}, "a", None).are((1, 2)),
    ],
)
def test_what_it_cannot_take_is_an_error(call: Any) -> None:
    with pytest.raises(TypeError):
        call(native)
