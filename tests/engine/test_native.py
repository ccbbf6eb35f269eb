"""The compiled inner loops do what their twins in Python do, leave no references behind, and refuse what they cannot take."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import types
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.engine import _acceleration, _frame, _packing, _slot, _unpack, checkpoint
from lowtide.engine._guards import _reading
from lowtide.engine._thread import StopReplay
from lowtide.errors import InputChangedError

native = _acceleration.native
needs_native = pytest.mark.skipif(native is None, reason="the engine was not compiled here, or LOWTIDE_NATIVE=0 says so")


@pytest.fixture(scope="module")
def twins() -> dict[str, ModuleType]:
    """The modules as they are where nothing was compiled."""
    there, _acceleration.native = _acceleration.native, None
    names = {"slot": _slot, "reading": _reading, "packing": _packing}
    try:
        return {name: _loaded_anew(module) for name, module in names.items()}
    finally:
        _acceleration.native = there


def _loaded_anew(module: ModuleType) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_twin", str(module.__file__))
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_engine_is_compiled_wherever_it_can_be() -> None:
    if os.environ.get("LOWTIDE_NATIVE") == "0":
        assert native is None
    elif shutil.which("cc") or shutil.which("gcc"):
        assert native is not None, "compile it: python build_native.py"


def test_a_variable_of_the_environment_has_it_run_in_python() -> None:
    code = "from lowtide.engine import _acceleration as a, _slot as s; print(a.native, s.Slot.__mro__[1].__name__)"
    environment = {**os.environ, "LOWTIDE_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["None", "_Fields"]


_TABLES = st.lists(st.dictionaries(st.integers(0, 3), st.sampled_from([object() for _ in range(3)]), max_size=3), max_size=4)


@needs_native
@given(tables=_TABLES, others=_TABLES, data=st.data())
def test_tables_are_read_alike(twins: dict[str, ModuleType], tables: list[dict[Any, Any]], others: list[dict[Any, Any]], data: Any) -> None:
    twin = twins["reading"]
    sizes = [*map(len, tables)]
    values = twin.values_of(tables, sizes)
    assert native is not None
    assert native.values_of(tables, sizes) == values
    changed = data.draw(st.sampled_from([sizes, [*map(len, others)], [size + 1 for size in sizes], sizes[1:]]))
    assert native.values_of(tables, changed) == twin.values_of(tables, changed)
    skipped = data.draw(st.lists(st.integers(0, max(len(values) - 1, 0)), unique=True, max_size=len(values)).map(sorted))
    for wanted in (values, twin.values_of(others, [*map(len, others)]), values[1:], [*values, object()], values[::-1]):
        for places in ([], skipped):
            assert native.same_values(tables, changed, wanted, places) is twin.same_values(tables, changed, wanted, places)
            assert native.same_values(tables, sizes, wanted, places) is twin.same_values(tables, sizes, wanted, places)


@needs_native
def test_versions_are_read_alike(twins: dict[str, ModuleType]) -> None:
    twin = twins["reading"]
    assert native is not None
    tensors = [torch.zeros(2), torch.zeros(2).mul_(2), torch.nn.Parameter(torch.zeros(1))]
    then = twin.versions_of(tensors)
    assert native.versions_of(tensors) == then == [0, 1, 0]
    assert native.are_versions(tensors, then)
    tensors[0].add_(1)
    assert not native.are_versions(tensors, then)
    assert not native.are_versions(tensors, then[1:])
    with torch.inference_mode():
        inference = torch.zeros(1)
    for wrong, error in ((5, AttributeError), (inference, RuntimeError)):
        for module in (native, twin):
            with pytest.raises(error):
                module.versions_of([tensors[1], wrong])
            with pytest.raises(error):
                module.are_versions([tensors[1], wrong], [1, 0])
    for module in (native, twin):
        assert module.versions_of([None, tensors[1]]) == [-1, 1]
        assert module.are_versions([None, tensors[1]], [-1, 1])
        assert not module.are_versions([None, tensors[1]], [0, 1])


class _Frame:
    _strange = False


def _saved() -> list[torch.Tensor]:
    """Tensors of every kind that a forward saves: an input, a view of it, a parameter, a view of one, what was computed."""
    leaf, weight = torch.ones(2, 3), torch.nn.Parameter(torch.ones(3, 2))
    made = leaf @ weight
    return [leaf, leaf[0], weight, weight.t(), made, made.t(), made.detach(), torch.ones(2).to_sparse()]


def _described(packed: Any) -> tuple[Any, ...]:
    if isinstance(packed, tuple):
        return "held", *packed
    return (
        *("slot", packed.index, packed.dtype, packed.shape, packed.value, packed.given, packed.ref()),
        None if packed.ref is _slot.gone else packed.version,
    )


@needs_native
@pytest.mark.parametrize("first", [0, 3])
def test_tensors_are_packed_alike(twins: dict[str, ModuleType], first: int) -> None:
    tensors = [*_saved(), *_saved()[:4]]
    plain, grads = [0, 1, 2, 0, 1, 2, 1, 1, 0], [False, False, True, True, False, True, False, False, True]
    free, region = ("free", 0, "region"), object()
    seen = []
    for make in (_packing.packing, twins["packing"].packing):
        frame, slots = _Frame(), [None] * first
        pack = make(slots, plain, grads, first, frame, region, lambda tensor, _: free if tensor is tensors[0] else None)  # type: ignore[arg-type]
        packed = [pack(tensor) for tensor in tensors]
        assert [ref and ref() for ref in slots[first:]] == [None if isinstance(held, tuple) else held for held in packed]
        seen.append(([_described(held) for held in packed], frame._strange))
    assert repr(seen[0]) == repr(seen[1])
    assert seen[0][1]


def _ends(fill: Any, tensor: torch.Tensor) -> bool:
    try:
        fill(tensor)
    except StopReplay:
        return True
    return False


@needs_native
@pytest.mark.parametrize("kind", ["all", "some are gone", "one is there", "another shape", "another dtype", "early", "too many"])
def test_slots_are_filled_alike(twins: dict[str, ModuleType], kind: str) -> None:
    seen = []
    for module in (_packing, twins["packing"]):
        tensors = [torch.ones(2), torch.ones(3), torch.ones(4)]
        slots: list[Any] = []
        pack = module.packing(slots, [2, 1, 2], [False] * 3, 0, _Frame(), object(), None)
        held = [pack(tensor) for tensor in tensors]
        if kind == "some are gone":
            del held[1]
        if kind == "one is there":
            held[0].value, held[0].version = tensors[0], 7
        fill = module.Filling(slots, 1 if kind == "early" else 2, 1 if kind == "early" else 2)
        given = [torch.ones(2), torch.ones(3), torch.ones(4), torch.ones(5)]
        given[1] = torch.ones(9) if kind == "another shape" else torch.ones(3).double() if kind == "another dtype" else given[1]
        ended = [_ends(fill, tensor) for tensor in (given if kind == "too many" else given[:3])]
        ours = [
            [slot.value is tensor for tensor in (*given, *tensors)] + [slot.version if slot.value is not None else None] for slot in held
        ]
        seen.append((ended, fill.reached < 0 or fill.reached, ours))
    assert seen[0] == seen[1]


@needs_native
@pytest.mark.parametrize("given_only", [False, True])
def test_slots_are_looked_through_alike(twins: dict[str, ModuleType], given_only: bool) -> None:
    seen = []
    for module in (_packing, twins["packing"]):
        slots: list[Any] = []
        pack = module.packing(slots, [2] * 6, [False] * 6, 0, _Frame(), object(), None)
        held = [pack(torch.ones(2)) for _ in range(6)]
        slots[1] = None
        for place, had in ((2, True), (4, False), (5, True)):
            held[place].value, held[place].given = torch.ones(2), had
        del held[3]
        before = [[module.last_wanted(slots, wanted, end) for end in range(7)] for wanted in range(6)]
        module.drop_values(slots, given_only)
        after = [[module.last_wanted(slots, wanted, end) for end in range(7)] for wanted in range(6)]
        seen.append((before, after, [(slot.index, slot.value is None, slot.given) for slot in held]))
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]


@needs_native
def test_what_was_packed_is_unpacked_or_left_to_python() -> None:
    assert native is not None
    assert _unpack.unpack is native.unpack
    tensor = torch.ones(2)
    assert native.unpack((tensor, 0, object())) is tensor
    slot = _slot.Slot()
    slot.value, slot.version = tensor, 0
    assert native.unpack(slot) is tensor
    assert slot.given
    slot.version, slot.frame = 1, _Frame()
    slot.frame.region = types.SimpleNamespace(name="named")
    for packed in (slot, (tensor, 1, slot.frame.region)):
        with pytest.raises(InputChangedError, match=r"'named' had version 1, now it has version 0"):
            native.unpack(packed)
    other = _slot.Slot()
    other.value, other.ref, other.version = None, lambda: tensor, 0
    assert native.unpack(other) is tensor
    assert not other.given


@needs_native
def test_nothing_is_left_behind() -> None:
    assert native is not None
    tensor, table, frame, region, keep = torch.ones(2), {"a": object()}, _Frame(), object(), (lambda *_: None)
    watched = [tensor, table, table["a"], frame, region, keep, _slot.gone, _slot.Slot, StopReplay]

    def use() -> None:
        slots: list[Any] = []
        pack = _packing.packing(slots, [0, 1, 2], [True] * 3, 0, frame, region, keep)  # type: ignore[arg-type]
        held = [pack(tensor) for _ in range(4)]
        fill = _packing.Filling(slots, 3, 3)
        for _ in range(3):
            fill(tensor)
        with pytest.raises(StopReplay):
            fill(tensor)
        assert _packing.last_wanted(slots, 0, 4) == 0
        assert all(sys.getrefcount(ref) <= 3 for ref in slots if ref is not None)  # of the list, the loop and the argument
        assert [native.unpack(slot) for slot in held] == [tensor] * 4  # type: ignore[union-attr]
        _packing.drop_values(slots, False)
        assert _packing.last_wanted(slots, 0, 4) == 3
        values = native.values_of([table], [1])
        assert native.same_values([table], [1], values, [])
        assert native.are_versions([tensor], native.versions_of([tensor]))

    use()
    gc.collect()
    before = [sys.getrefcount(value) for value in watched]
    for _ in range(50):
        use()
    gc.collect()
    assert [sys.getrefcount(value) for value in watched] == before


@needs_native
def test_cycles_through_slots_and_hooks_are_collected() -> None:
    frame = _Frame()
    slots: list[Any] = []
    frame.pack = _packing.packing(slots, [], [], 0, frame, object(), lambda *_: None)  # type: ignore[attr-defined, arg-type]
    frame.slot = frame.pack(torch.ones(2, requires_grad=True) * 2)  # type: ignore[attr-defined]
    gone = weakref.ref(frame)
    del frame
    gc.collect()
    assert gone() is None
    assert slots[0]() is None


@needs_native
@pytest.mark.parametrize(
    "call",
    [
        lambda n: n.values_of([1], [1]),
        lambda n: n.values_of({}, {}),
        lambda n: n.same_values([[]], [0], [], []),
        lambda n: n.same_values([{}], [0], []),
        lambda n: n.versions_of(()),
        lambda n: n.are_versions([], None),
        lambda n: n.Filling((), 0, 0),
        lambda n: n.Filling([], 0, 0)(),
        lambda n: n.Packing([], [], [], 0, None, None),
        lambda n: n.Packing([], [], [], 0, None, None, None)(),
        lambda n: n.last_wanted((), 0, 0),
        lambda n: n.drop_values(None, False),
        lambda n: n.drop_values([5], False),
        lambda n: n.last_wanted([5], -1, 1),
        lambda n: n.Filling([5], 0, 0)(torch.ones(1)),
        lambda n: n.configure(int, None, None, None),
    ],
)
def test_what_it_cannot_take_is_an_error(call: Any) -> None:
    with pytest.raises(TypeError):
        call(native)


@needs_native
def test_regions_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made, there = [], _frame.packing
    monkeypatch.setattr(_frame, "packing", lambda *parts: made.append(there(*parts)) or made[-1])
    layer = torch.nn.Linear(3, 3)
    checkpoint(layer)(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert native is not None
    assert [type(pack) for pack in made] == [native.Packing]


def _build_script() -> ModuleType:
    script = Path(__file__).parents[2] / "build_native.py"
    spec = importlib.util.spec_from_file_location("build_native", script)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_without_a_compiler_lowtide_is_installed_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = _build_script()
    if not build.can_compile():
        pytest.skip("another kind of Python, for which nothing is compiled")
    for package in build.PACKAGES:
        (tmp_path / package).mkdir(parents=True)
        for source in (build.ROOT / package).glob("_native*.[ch]"):
            shutil.copy(source, tmp_path / package)
    shutil.copy(build.ROOT / build.HELPERS, tmp_path / build.HELPERS)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    data: dict[str, Any] = {"artifacts": []}
    told: list[str] = []
    build.add_to_wheel(data, told.append)
    assert data == {"artifacts": []}
    assert "run in Python" in told[0]


def test_what_is_compiled_goes_into_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    build = _build_script()
    made = [build.ROOT / package / "_native.so" for package in build.PACKAGES]
    monkeypatch.setattr(build, "compile_in_place", lambda: made)
    data: dict[str, Any] = {"artifacts": []}
    build.add_to_wheel(data, pytest.fail)
    assert data == {"artifacts": ["src/lowtide/engine/_native.so", "src/lowtide/trace/_native.so"], "pure_python": False, "infer_tag": True}
