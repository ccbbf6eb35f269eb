"""A trace as JSON: one object, a column for each field of the records, and one table of all texts.

A step of a large model has tens of thousands of ops. Written record by record, names of fields and source lines would be
nine tenths of the file; by column and with texts by index it is some 100 bytes an op, and reading checks a column at a time.
Traces travel between machines and are edited by nobody, so a file is checked entry by entry before it is believed: an index
out of range would otherwise surface as a wrong plan. ``trace.schema.json`` beside this file says the same to other programs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lowtide.errors import TraceError

if TYPE_CHECKING:
    from lowtide.records._records import StepTrace

FORMAT = "lowtide.trace"
VERSION = 5
_SINCE = {"functions": 2, "gathers": 4}
"""The version in which a table was first written; older files lack it."""
_WITHOUT_REPLACED, _WITHOUT_AT_END = 2, 4

_HEADER: dict[str, type] = {"fingerprint": str, "device": str, "torch_version": str, "fake": bool, "timing": str}


@dataclass(frozen=True, slots=True)
class _Column:
    """How one field of a record is written.

    Attributes:
        kind: ``count``, ``number``, ``text`` (an index into the texts), ``flag`` (the column lists the records that have it),
            or ``counts`` (a list of counts in each record).
        of: what its counts are indices into, a table or ``texts``; ``ops_end`` for a moment, which may be the end of the step.
        optional: ``null`` is allowed.
        read: what a text becomes in the record.
    """

    kind: str
    of: str | None = None
    optional: bool = False
    read: Callable[[str], Any] = str


def _tables() -> dict[str, tuple[type, dict[str, _Column]]]:
    from lowtide.records._records import Call, Category, FunctionCall, Gather, Op, Phase, SavedTensor, Storage

    text, count, flag = _Column("text", "texts"), _Column("count"), _Column("flag")
    moment, storage, storages = _Column("count", "ops_end"), _Column("count", "storages"), _Column("counts", "storages")
    call = _Column("count", "calls", optional=True)
    op = {"name": text, "phase": _Column("text", "texts", read=Phase), "call": call, "source": text, "seconds": _Column("number")}
    op |= {"workspace_bytes": count, "random": flag, "reads": storages, "writes": storages, "born_bytes": count, "collective": flag}
    op |= {"origin": _Column("count", "ops", optional=True)}
    stored = {"bytes": count, "category": _Column("text", "texts", read=Category), "born": moment, "freed": moment, "resident": flag}
    saved = {"storage": storage, "bytes": count, "call": call, "position": moment, "used": _Column("count", "ops_end", optional=True)}
    saved |= {"released": moment, "node": text, "dtype": text, "shape": _Column("counts"), "shared": flag, "at_end": flag}
    calls = {"path": text, "type": text, "parent": call, "start": moment, "end": moment, "inputs": storages, "outputs": storages}
    calls |= {"replayable": flag, "replaced": storages}
    functions = {"function": text, "call": _Column("count", "calls"), "start": moment, "end": moment, "outputs": storages}
    gathers = {"call": _Column("count", "calls"), "storages": storages, "seconds": _Column("number"), "whole_from": moment}
    gathers |= {"whole_until": moment}
    return {
        "ops": (Op, op),
        "storages": (Storage, stored),
        "saved": (SavedTensor, saved),
        "calls": (Call, calls),
        "functions": (FunctionCall, functions),
        "gathers": (Gather, gathers),
    }


def encode(trace: StepTrace) -> str:
    """A trace as JSON text, one column a line."""
    texts: dict[str, int] = {}
    fields: dict[str, Any] = {"format": FORMAT, "version": VERSION, **{name: getattr(trace, name) for name in _HEADER}}
    tables = {name: _columns(getattr(trace, name), columns, texts) for name, (_, columns) in _tables().items()}
    lines = [f"{_compact(name)}:{_compact(value)}" for name, value in {**fields, "texts": list(texts)}.items()]
    for name, columns in tables.items():
        body = ",\n".join(f" {_compact(column)}:{_compact(value)}" for column, value in columns.items())
        lines.append(f"{_compact(name)}:{{\n{body}}}")
    return "{" + ",\n".join(lines) + "}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _columns(records: Sequence[Any], columns: Mapping[str, _Column], texts: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"count": len(records)}
    for name, column in columns.items():
        values = map(attrgetter(name), records)
        if column.kind == "flag":
            found[name] = [i for i, value in enumerate(values) if value]
        elif column.kind == "text":
            found[name] = [texts.setdefault(getattr(value, "value", value), len(texts)) for value in values]
        else:
            found[name] = list(values)
    return found


def decode(text: str) -> StepTrace:
    """Read a trace.

    Raises:
        TraceError: with a sentence on what is wrong.
    """
    from lowtide.records._records import StepTrace

    data = _parse(text)
    _check_header(data)
    tables = {name: table for name, table in _tables().items() if _SINCE.get(name, 1) <= data["version"]}
    if data["version"] <= _WITHOUT_REPLACED:
        del tables["calls"][1]["replaced"]
    if data["version"] <= _WITHOUT_AT_END:
        del tables["saved"][1]["at_end"]
    _check_names("the trace", data, ("format", "version", *_HEADER, "texts", *tables))
    header = {name: _of_type(name, data[name], kind) for name, kind in _HEADER.items()}
    reader = _Reader(_texts(data["texts"]), {name: _size(name, data[name], columns) for name, (_, columns) in tables.items()})
    fields: dict[str, Any] = {name: reader.records(name, data[name], *tables[name]) for name in tables}
    return StepTrace(**header, **fields)


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"the trace is damaged or no trace: it is not JSON ({error})") from error
    if not isinstance(data, dict):
        raise TraceError(f"this is not a trace: a JSON object was required, found {_shown(data)}")
    return data


def _check_header(data: Mapping[str, Any]) -> None:
    if data.get("format") != FORMAT:
        raise TraceError(f'this is not a trace: its "format" is {_shown(data.get("format"))}, {FORMAT!r} was required')
    version = data.get("version")
    if version not in range(1, VERSION + 1) or type(version) is not int:
        raise TraceError(
            f"the trace has version {_shown(version)}, this lowtide reads versions 1 to {VERSION}: "
            "trace the step again, or use the lowtide that wrote it"
        )


def _check_names(what: str, data: Mapping[str, Any], names: Iterable[str]) -> None:
    known = dict.fromkeys(names)
    for name in known:
        if name not in data:
            raise TraceError(f"{what} is damaged: the field {name!r} is missing")
    for name in data:
        if name not in known:
            raise TraceError(f"{what} is damaged: it has an unknown field {name!r}")


def _of_type(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _wrong(name, "text" if kind is str else "true or false", value)
    return value


def _texts(value: Any) -> list[str]:
    for i, text in enumerate(_list("texts", value)):
        if not isinstance(text, str):
            raise _wrong(f"texts[{i}]", "text", text)
    return value  # type: ignore[no-any-return]


def _size(name: str, table: Any, columns: Mapping[str, _Column]) -> int:
    if not isinstance(table, dict):
        raise _wrong(name, "an object", table)
    _check_names(f"{name} of the trace", table, ("count", *columns))
    if not _is_count(table["count"]):
        raise _wrong(f"{name}.count", "a whole number, not negative", table["count"])
    return int(table["count"])


class _Reader:
    """Reads columns, knowing how large everything is that they point into."""

    def __init__(self, texts: list[str], sizes: dict[str, int]) -> None:
        self._texts, self._sizes = texts, sizes
        self._limits = {**sizes, "texts": len(texts), "ops_end": sizes["ops"] + 1}

    def records(self, name: str, table: Mapping[str, Any], kind: type, columns: Mapping[str, _Column]) -> tuple[Any, ...]:
        """The records of one table."""
        values = [self._values(f"{name}.{field}", table[field], column, self._sizes[name]) for field, column in columns.items()]
        fields = tuple(columns)
        return tuple(kind(**dict(zip(fields, row, strict=True))) for row in zip(*values, strict=True))

    def _values(self, where: str, found: Any, column: _Column, size: int) -> list[Any]:
        entries = _list(where, found)
        if column.kind == "flag":
            return self._flags(where, entries, size)
        if len(entries) != size:
            raise TraceError(f"the trace is damaged: {where} must have {size} entries, found {len(entries)}")
        self._check(where, entries, column)
        if column.kind == "text":
            return [_known(where, column, self._texts[entry]) for entry in entries]
        return [tuple(entry) for entry in entries] if column.kind == "counts" else entries

    def _flags(self, where: str, entries: list[Any], size: int) -> list[bool]:
        self._counts(where, entries, size, optional=False)
        flags = [False] * size
        for entry in entries:
            flags[entry] = True
        return flags

    def _check(self, where: str, entries: list[Any], column: _Column) -> None:
        limit = None if column.of is None else self._limits[column.of]
        if column.kind == "number":
            for i, entry in enumerate(entries):
                if not _is_number(entry):
                    raise _wrong(f"{where}[{i}]", "a number, not negative", entry)
        elif column.kind == "counts":
            for i, entry in enumerate(entries):
                self._counts(f"{where}[{i}]", _list(f"{where}[{i}]", entry), limit, optional=False)
        else:
            self._counts(where, entries, limit, optional=column.optional)

    @staticmethod
    def _counts(where: str, entries: list[Any], limit: int | None, *, optional: bool) -> None:
        for i, entry in enumerate(entries):
            if entry is None and optional:
                continue
            if not _is_count(entry):
                raise _wrong(f"{where}[{i}]", "a whole number, not negative" + (", or null" if optional else ""), entry)
            if limit is not None and entry >= limit:
                raise _wrong(f"{where}[{i}]", f"below {limit}", entry)


def _known(where: str, column: _Column, text: str) -> Any:
    try:
        return column.read(text)
    except ValueError:
        raise TraceError(f"the trace is damaged: {where} has {text!r}, which this lowtide does not know") from None


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(name, "a list", value)
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _wrong(name: str, required: str, found: Any) -> TraceError:
    return TraceError(f"the trace is damaged: {name} must be {required}, found {_shown(found)}")


def _shown(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", type(None): "null"}
    return kinds.get(type(value), repr(value)[:80])
