"""Plans to JSON and back, every field checked by name and type.

A number that is written as text, or a field of a later version, is refused rather than guessed at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lowtide.errors import PlanError
from lowtide.records import Decision

if TYPE_CHECKING:
    from lowtide.plan._solution import KeptCall, Plan, PlannedRegion

FORMAT = "lowtide.plan"
VERSION = 4
_WITHOUT_KEPT, _WITHOUT_INSIDE, _WITHOUT_FIRST_SAVED = 1, 2, 3
"""The versions before plans named calls to keep, regions inside others, and how many saved tensors are dropped."""
_REGION_FIELDS = {
    _WITHOUT_KEPT: ("paths", "decision"),
    _WITHOUT_INSIDE: ("paths", "decision", "kept"),
    _WITHOUT_FIRST_SAVED: ("paths", "decision", "kept", "inside"),
    VERSION: ("paths", "decision", "kept", "inside", "first_saved"),
}
_TEXTS = ("fingerprint", "solver", "status", "device", "torch_version")
_COUNTS = ("budget_bytes", "predicted_peak_bytes")
_TIMES = ("predicted_step_s", "predicted_replay_s")
_FIELDS = (*_TEXTS, *_COUNTS, *_TIMES, "gap", "regions")


def encode(plan: Plan) -> dict[str, Any]:
    """A plan as what ``json.dumps`` takes."""
    flat = {name: getattr(plan, name) for name in _FIELDS if name != "regions"}
    return {"format": FORMAT, "version": VERSION, **flat, "regions": [_encoded(region) for region in plan.regions]}


def _encoded(region: PlannedRegion) -> dict[str, Any]:
    return {
        "paths": list(region.paths),
        "decision": region.decision.value,
        "kept": [asdict(call) for call in region.kept],
        "inside": [_encoded(inner) for inner in region.inside],
        "first_saved": region.first_saved,
    }


def decode(text: str) -> Plan:
    """Read a plan.

    Raises:
        PlanError: with a sentence on what is wrong.
    """
    from lowtide.plan._solution import Plan

    data = _parse(text)
    _check_header(data)
    _check_names("the plan", data, ("format", "version", *_FIELDS))
    fields: dict[str, Any] = {
        "regions": tuple(
            _region(f"region {i} of the plan", entry, data["version"]) for i, entry in enumerate(_list("regions", data["regions"]))
        ),
        "gap": None if data["gap"] is None else _number("gap", data["gap"]),
        **{name: _text(name, data[name]) for name in _TEXTS},
        **{name: _count(name, data[name]) for name in _COUNTS},
        **{name: _number(name, data[name]) for name in _TIMES},
    }
    return Plan(**fields)


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"the plan is damaged or no plan: it is not JSON ({error})") from error
    if not isinstance(data, dict):
        raise PlanError(f"this is not a plan: a JSON object was required, found {_kind(data)}")
    return data


def _check_header(data: Mapping[str, Any]) -> None:
    if data.get("format") != FORMAT:
        raise PlanError(f'this is not a plan: its "format" is {data.get("format")!r}, {FORMAT!r} was required')
    version = data.get("version")
    if version not in _REGION_FIELDS or isinstance(version, bool):
        raise PlanError(
            f"the plan has version {version!r}, this lowtide reads versions {_WITHOUT_KEPT} to {VERSION}: "
            "make the plan again, or use the lowtide that wrote it"
        )


def _check_names(what: str, data: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in data:
            raise PlanError(f"{what} is damaged: the field {name!r} is missing")
    for name in data:
        if name not in names:
            raise PlanError(f"{what} is damaged: it has an unknown field {name!r}")


def _region(what: str, entry: Any, version: int) -> PlannedRegion:
    from lowtide.plan._solution import PlannedRegion

    if not isinstance(entry, dict):
        raise _wrong(what, "an object", entry)
    _check_names(what, entry, _REGION_FIELDS[version])
    paths = tuple(_text(f"a path of {what}", path) for path in _list(f"the paths of {what}", entry["paths"]))
    kept = tuple(_kept(f"a kept call of {what}", call) for call in _list(f"the kept calls of {what}", entry.get("kept", [])))
    within = _list(f"the regions inside {what}", entry.get("inside", []))
    inside = tuple(_region(f"region {i} inside {what}", inner, version) for i, inner in enumerate(within))
    first = entry.get("first_saved")
    first_saved = None if first is None else _count(f"the saved tensors of {what}", first)
    return PlannedRegion(paths, _decision(what, entry["decision"]), kept, inside, first_saved)


def _kept(what: str, entry: Any) -> KeptCall:
    from lowtide.plan._solution import KeptCall

    if not isinstance(entry, dict):
        raise _wrong(what, "an object", entry)
    _check_names(what, entry, ("module", "function", "index"))
    module, function = (_text(f"the {name} of {what}", entry[name]) for name in ("module", "function"))
    return KeptCall(module, function, _count(f"the index of {what}", entry["index"]))


def _decision(what: str, value: Any) -> Decision:
    known = [d.value for d in Decision]
    if value not in known:
        raise PlanError(f"{what} is damaged: its decision is {value!r}, one of {', '.join(known)} was required")
    return Decision(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "text", value)
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(name, "a list", value)
    return value


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _wrong(name, "a whole number, not negative", value)
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise _wrong(name, "a number, not negative", value)
    return float(value)


def _wrong(name: str, required: str, found: Any) -> PlanError:
    shown = repr(found) if isinstance(found, (int, float, str)) else _kind(found)
    return PlanError(f"the plan is damaged: {name} must be {required}, found {shown}")


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "text", type(None): "null"}.get(type(value), f"a {type(value).__name__}")
