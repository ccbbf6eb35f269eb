"""Explanations as tables for a terminal, and as a dictionary for machines."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowtide.explain import peak
from lowtide.report._figures import Subject
from lowtide.report._tables import plain_table
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.explain import (
        AdviceReport,
        Alive,
        Explanation,
        FrontierPoint,
        OutOfMemory,
        Peak,
        RegionReplay,
        SavedTable,
    )
    from lowtide.records import StepTrace

SECTIONS = ("peak", "saved", "regions", "frontier", "advice")
EXPLANATION_FORMAT = "lowtide.explanation"
EXPLANATION_VERSION = 1
_ROWS = 15
_MOST_STORAGES = 200

Row = TypeVar("Row")


def explanation_tables(found: Explanation, sections: Iterable[str] = SECTIONS) -> RenderableType:
    """The chosen sections, one below the other."""
    made = {
        "peak": lambda: peak_tables(found.peak),
        "saved": lambda: saved_tables(found.saved),
        "regions": lambda: causes_table(found.regions),
        "frontier": lambda: frontier_table(found.frontier),
        "advice": lambda: advice_table(found.advice),
    }
    return Group(*(made[section]() for section in sections))


def peak_tables(top: Peak) -> RenderableType:
    """The peak by category, and by owner."""
    table = plain_table(f"peak {format_bytes(top.bytes)} in {top.phase.value}, at {top.op_name} ({top.path})", "owner", "for")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("share", justify="right")
    groups = _alike(top.owners, lambda owner: (owner.path, owner.category.value), lambda owner: owner.bytes)
    for path, owners in groups[:_ROWS]:
        size = sum(owner.bytes for owner in owners)
        table.add_row(Text(path), owners[0].category.value, format_bytes(size), f"{size / top.bytes:.1%}")
    parts = ", ".join(f"{format_bytes(size)} of {category.value}" for category, size in top.categories)
    at = f"{format_seconds(top.start_s)} of {format_seconds(top.step_s)} into the step"
    return _captioned(table, f"{parts}\n{at}{f', {top.source}' if top.source else ''}{_more(groups)}")


def saved_tables(saved: SavedTable) -> RenderableType:
    """The saved tensors that keep the most, and what is kept twice."""
    table = plain_table(f"saved tensors: {format_bytes(saved.storage_bytes)} of storage", "module", "node", "dtype")
    for heading in ("tensors", "bytes", "storage kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    groups = _alike(saved.rows, lambda row: (row.path, row.node, row.dtype), lambda row: row.storage_bytes)
    for path, rows in groups[:_ROWS]:
        tensors = sum(row.tensors for row in rows)
        numbers = format_bytes(sum(row.bytes for row in rows)), format_bytes(sum(row.storage_bytes for row in rows))
        table.add_row(Text(path), rows[0].node, rows[0].dtype or "—", str(tensors), *numbers)
    twice = sum(pair.copy_bytes for pair in saved.twice)
    again = f"; {format_bytes(twice)} are kept a second time in another dtype" if twice else ""
    return _captioned(table, f"{saved.tensors} tensors, {len(saved.shared)} storages with several savers{again}{_more(groups)}")


def causes_table(regions: tuple[RegionReplay, ...]) -> RenderableType:
    """What replays free, and why they free nothing."""
    table = plain_table("what replaying a module frees", "module")
    for heading in ("saved", "freed", "peak falls", "replay"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why not", overflow="fold", min_width=14)
    for row in regions:
        numbers = (format_bytes(count) for count in (row.saved_bytes, row.freed_bytes, row.peak_fall_bytes))
        why = ", ".join(f"{r.cause.value} ({r.peak_in.value})" if r.peak_in else r.cause.value for r in row.reasons)
        table.add_row(Text(row.name), *numbers, format_seconds(row.replay_s), why)
    return table


def frontier_table(points: tuple[FrontierPoint, ...]) -> RenderableType:
    """Time against memory."""
    table = plain_table("time against memory")
    for heading in ("peak", "step time", "of it replay", "regions", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        numbers = format_bytes(point.peak_bytes), format_seconds(point.step_s), format_seconds(point.replay_s)
        table.add_row(*numbers, str(len(point.regions)), point.status)
    return table


def advice_table(report: AdviceReport) -> RenderableType:
    """What would help, under the verdict."""
    table = plain_table("what would help", "remedy")
    for heading in ("peak falls", "peak left", "time added"):
        table.add_column(heading, justify="right", no_wrap=True)
    for a in report.remedies:
        adds = format_seconds(a.adds_s) if a.adds_s else "≈ 0"
        table.add_row(a.remedy.value, format_bytes(a.saves_bytes), format_bytes(a.peak_bytes), adds)
    how = [f"{place}. {a.title}: {a.how}" for place, a in enumerate(report.remedies, start=1)]
    return _captioned(table, "\n".join([*how, report.verdict]))


def trace_summary_table(trace: StepTrace, subject: Subject) -> Table:
    """The main figures of a trace."""
    top = peak(trace)
    table = plain_table(f"{subject.title}, one step on {trace.device}", "")
    table.add_column("", justify="right")
    rows = (
        ("peak", f"{format_bytes(top.bytes)} in {top.phase.value}"),
        *((category.value, format_bytes(size)) for category, size in top.categories),
        ("step time, as traced", format_seconds(top.step_s)),
        *((name, f"{len(records):,}") for name, records in _counted(trace)),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table


def _counted(trace: StepTrace) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    return ("ops", trace.ops), ("storages", trace.storages), ("saved tensors", trace.saved), ("module calls", trace.calls)


def alive_tables(lives: tuple[Alive, ...]) -> RenderableType:
    """What holds each storage, and who lets go last."""
    return Group(*(_life(life) for life in lives))


def _life(life: Alive) -> RenderableType:
    made = f"{life.made_by} ({life.path})" if life.made_by else f"there before the step ({life.path})"
    table = plain_table(f"storage {life.storage}: {format_bytes(life.bytes)}, {made}", "held by", "name", "module")
    for heading in ("from op", "until op"):
        table.add_column(heading, justify="right")
    table.add_column("line", overflow="fold")
    for holder in life.holders:
        line = holder.source.replace("\\", "/").rsplit("/", 1)[-1]
        table.add_row(holder.kind, holder.name, Text(holder.path), str(holder.since), str(holder.until), Text(line))
    return table


def out_of_memory_table(found: OutOfMemory) -> RenderableType:
    """What was alive when memory ran out."""
    table = plain_table(f"out of memory at {format_bytes(found.limit_bytes)}", "owner", "for")
    for heading in ("blocks", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    groups = _alike(found.holdings, lambda holding: (holding.owner, holding.category.value), lambda holding: holding.bytes)
    for owner, group in groups[:_ROWS]:
        blocks, size = sum(holding.blocks for holding in group), sum(holding.bytes for holding in group)
        table.add_row(Text(owner), group[0].category.value, str(blocks), format_bytes(size))
    return _captioned(table, found.summary() + _more(groups))


def explanation_dict(found: Explanation, sections: Iterable[str] = SECTIONS) -> dict[str, Any]:
    """An explanation as plain numbers, texts, lists and dictionaries; ``json.dumps`` takes it as it is.

    Returns:
        ``format`` and ``version``, and a key for each section, with the fields of its record; of the storages alive at the
        peak the 200 largest.
    """
    shown = dataclasses.replace(found.peak, storages=found.peak.storages[:_MOST_STORAGES])
    parts = {"peak": shown, "saved": found.saved, "regions": found.regions, "frontier": found.frontier, "advice": found.advice}
    return {"format": EXPLANATION_FORMAT, "version": EXPLANATION_VERSION, **{s: plain(parts[s]) for s in sections}}


def plain(value: Any) -> Any:
    """A record and all in it as what JSON has.

    >>> from lowtide.explain import Holding
    >>> from lowtide.records import Category
    >>> plain((Holding("head", Category.ACTIVATION, 12, 1),))
    [{'owner': 'head', 'category': 'activations', 'bytes': 12, 'blocks': 1}]
    """
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def _alike(rows: Iterable[Row], of: Callable[[Row], tuple[str, ...]], size: Callable[[Row], int]) -> list[tuple[str, list[Row]]]:
    """Rows whose module paths differ only in a number go together, under a name for all of them; the largest groups first."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        path, *rest = of(row)
        groups.setdefault((re.sub(r"\d+", "#", path), *rest), []).append(row)
    ordered = sorted(groups.values(), key=lambda group: -sum(map(size, group)))
    return [(_name([of(row)[0] for row in group]), group) for group in ordered]


def _name(paths: list[str]) -> str:
    ordered = sorted(dict.fromkeys(paths), key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path)])
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} … {ordered[-1]} ({len(ordered)})"


def _more(rows: Sequence[Any]) -> str:
    return f"\n{len(rows) - _ROWS} more rows: --json, or the HTML report" if len(rows) > _ROWS else ""


def _captioned(table: Table, text: str) -> Table:
    table.caption, table.caption_justify = Text(text), "left"
    return table
