"""A trace as a file: what was written is read back, without torch, and nothing damaged is believed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import TraceError
from lowtide.plan import simulate
from lowtide.records import StepTrace
from lowtide.trace import trace

sys.path.insert(0, str(Path(__file__).parent))
from _steps import gpt

SRC = Path(__file__).parent.parent.parent / "src"


@pytest.fixture(scope="module")
def traced() -> StepTrace:
    return trace(*gpt())


@pytest.fixture
def data(traced: StepTrace) -> dict[str, Any]:
    return json.loads(traced.to_json())


def schema() -> dict[str, Any]:
    return json.loads(files("lowtide.records").joinpath("trace.schema.json").read_text(encoding="utf-8"))


def test_what_was_saved_is_loaded(traced: StepTrace, tmp_path: Path) -> None:
    traced.save(tmp_path / "step.json")
    assert StepTrace.load(tmp_path / "step.json") == traced
    assert [file.name for file in tmp_path.iterdir()] == ["step.json"]


def test_a_trace_is_loaded_and_simulated_without_torch(traced: StepTrace, tmp_path: Path) -> None:
    traced.save(tmp_path / "step.json")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from lowtide.records import StepTrace\nfrom lowtide.plan import simulate\n"
        f"print(simulate(StepTrace.load({str(tmp_path / 'step.json')!r}), None).peak_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SRC)})
    assert int(done.stdout) == simulate(traced, None).peak_bytes


def test_a_file_has_few_bytes_an_op(traced: StepTrace) -> None:
    assert len(traced.to_json()) < 120 * len(traced.ops)


def test_a_file_is_valid_by_the_schema_that_is_shipped(data: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(data, schema())
    data["ops"]["seconds"][0] = -1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema())


def test_the_schema_has_the_very_fields_of_the_file(data: dict[str, Any]) -> None:
    described = schema()
    assert set(described["properties"]) == set(described["required"]) == set(data)
    for name in ("ops", "storages", "saved", "calls", "functions", "gathers"):
        table = described["properties"][name]
        assert set(table["properties"]) == set(table["required"]) == set(data[name])


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], str]:
    def text(data: dict[str, Any]) -> str:
        change(data)
        return json.dumps(data)

    return text


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "half a file": (lambda data: json.dumps(data)[:-9], "not JSON"),
    "a list": (lambda _: "[]", "a JSON object was required"),
    "a plan": (broken(lambda d: d.update(format="lowtide.plan")), "'lowtide.trace' was required"),
    "another version": (broken(lambda d: d.update(version=6)), "version 6, this lowtide reads versions 1 to 5"),
    "a version that is no number": (broken(lambda d: d.update(version=True)), "version True"),
    "no device": (broken(lambda d: d.pop("device")), "'device' is missing"),
    "a device of another kind": (broken(lambda d: d.update(device=1)), "device must be text, found 1"),
    "an unknown field": (broken(lambda d: d["ops"].update(colour=[])), "unknown field 'colour'"),
    "a column that is missing": (broken(lambda d: d["ops"].pop("reads")), "ops of the trace is damaged: the field 'reads'"),
    "a column that is short": (broken(lambda d: d["saved"]["node"].pop()), "saved.node must have"),
    "a count that is negative": (broken(lambda d: d["storages"]["bytes"].__setitem__(3, -4)), r"storages.bytes\[3\] must be"),
    "a count that is a fraction": (broken(lambda d: d["storages"]["bytes"].__setitem__(3, 0.5)), r"storages.bytes\[3\] must be"),
    "a time that is no number": (broken(lambda d: d["ops"]["seconds"].__setitem__(0, "1")), r"ops.seconds\[0\] must be a number"),
    "a storage that is not there": (broken(lambda d: d["ops"]["reads"].__setitem__(2, [10**6])), r"ops.reads\[2\]\[0\] must be below"),
    "a call that is not there": (broken(lambda d: d["ops"]["call"].__setitem__(0, 10**6)), r"ops.call\[0\] must be below"),
    "a moment after the end": (broken(lambda d: d["storages"]["freed"].__setitem__(0, 10**6)), r"storages.freed\[0\] must be below"),
    "a text that is not there": (broken(lambda d: d["calls"]["path"].__setitem__(0, 10**6)), r"calls.path\[0\] must be below"),
    "a text that is a number": (broken(lambda d: d["texts"].__setitem__(0, 7)), r"texts\[0\] must be text"),
    "a null where none may be": (broken(lambda d: d["saved"]["released"].__setitem__(0, None)), r"saved.released\[0\] must be"),
    "an unknown phase": (broken(lambda d: d["ops"]["phase"].__setitem__(0, 0)), "which this lowtide does not know"),
    "a flag of no op": (broken(lambda d: d["ops"]["random"].append(10**6)), r"ops.random\[\d+\] must be below"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_refused_with_a_sentence_on_what_is_wrong(
    data: dict[str, Any], damage: Callable[[dict[str, Any]], str], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        StepTrace.from_json(damage(data))


def test_a_file_from_before_functions_were_recorded_is_read(traced: StepTrace, data: dict[str, Any]) -> None:
    del data["functions"], data["calls"]["replaced"], data["gathers"], data["saved"]["at_end"]
    data["version"] = 1
    saved = tuple(dataclasses.replace(slot, at_end=False) for slot in traced.saved)
    assert StepTrace.from_json(json.dumps(data)) == dataclasses.replace(traced, functions=(), saved=saved)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*nothing\.json: No such file"):
        StepTrace.load(tmp_path / "nothing.json")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not text"):
        StepTrace.load(tmp_path / "t")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(traced: StepTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "step.json"
    target.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(TraceError, match="No space left"):
        traced.save(target)
    assert target.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["step.json"]
