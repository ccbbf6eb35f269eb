"""The figures and decisions as tables for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from lowtide.records import Decision
from lowtide.report._figures import Subject, figures
from lowtide.report._fitted import Fitted
from lowtide.report._regions import RegionRow
from lowtide.report._timeline import region_name
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.plan import Plan

_COLOURS = {Decision.KEEP: "green", Decision.RECOMPUTE: "cyan", Decision.OFFLOAD: "magenta", Decision.COMPRESS: "yellow"}


def fit_table(fit: Fitted, subject: Subject) -> Table:
    """The table that ends a fit: every main figure without and with the plan."""
    table = _table(f"{subject.title} in {format_bytes(fit.budget_bytes)}")
    table.add_column("", no_wrap=True)
    table.add_column("without plan", justify="right")
    table.add_column("with plan", justify="right")
    table.add_column("", justify="right")
    for row in figures(fit, subject):
        table.add_row(row.name, row.plain, row.planned, row.change, style="bold red" if row.alarming else None)
    return table


def region_table(rows: Iterable[RegionRow]) -> Table:
    """What was decided for each region; equal neighbours such as ``blocks.0`` to ``blocks.3`` share a line.

    ``saved`` are the bytes that autograd saved there, ``freed`` what its replay lets go of, ``replay`` its predicted time.
    """
    table = _table("decisions")
    table.add_column("region", overflow="fold", min_width=16)
    table.add_column("module", overflow="ellipsis", no_wrap=True)
    table.add_column("decision")
    for heading in ("saved", "freed", "replay"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in grouped(rows):
        freed = (format_bytes(row.freed_bytes), format_seconds(row.replay_s)) if row.decision is not Decision.KEEP else ("", "")
        table.add_row(Text(row.name), row.type, _decision(row.decision), format_bytes(row.saved_bytes), *freed)
    return table


def plan_table(plan: Plan, title: str) -> Table:
    """A plan as it stands in its file, without the trace that it came from."""
    table = _table(title)
    table.add_column("#", justify="right")
    table.add_column("region", overflow="fold")
    table.add_column("modules", justify="right")
    table.add_column("decision")
    for number, region in enumerate(plan.regions, start=1):
        table.add_row(str(number), Text(region_name(region.paths)), str(len(region.paths)), _decision(region.decision))
    table.caption, table.caption_justify = Text(_summary(plan)), "left"
    return table


def _summary(plan: Plan) -> str:
    """Everything else that a plan knows, as lines."""
    made = " ".join(part for part in (plan.device, f"torch {plan.torch_version}" if plan.torch_version else "") if part)
    gap = "" if plan.gap is None else f", at most {plan.gap:.1%} of the replay time from the best"
    lines = (
        f"budget {format_bytes(plan.budget_bytes)}, predicted peak {format_bytes(plan.predicted_peak_bytes)}",
        f"predicted step {format_seconds(plan.predicted_step_s)}, of it replay {format_seconds(plan.predicted_replay_s)}",
        f"solver {plan.solver}: {plan.status}{gap}",
        f"traced on {made or 'an unknown device'}, for a model with fingerprint {plan.fingerprint}",
    )
    return "\n".join(lines)


def grouped(rows: Iterable[RegionRow]) -> Iterator[RegionRow]:
    """Neighbours that differ only in a number of their path become one row, with their bytes and seconds summed."""
    for _, run in groupby(rows, key=_likeness):
        members = list(run)
        yield members[0] if len(members) == 1 else _merged(members)


def _likeness(row: RegionRow) -> tuple[object, ...]:
    return len(row.paths), tuple(re.sub(r"\d+", "#", path) for path in row.paths[:1]), row.name.endswith("own ops"), row.type, row.decision


def _merged(members: list[RegionRow]) -> RegionRow:
    first, last = members[0], members[-1]
    return RegionRow(
        paths=tuple(path for member in members for path in member.paths),
        name=f"{first.name} … {last.name}" if len(first.paths) == 1 else f"{len(members)} segments, {first.name} to {last.name}",
        type=f"{len(members)} × {first.type}" if len(first.paths) == 1 else f"{len(members)} × ({first.type})",
        decision=first.decision,
        saved_bytes=sum(member.saved_bytes for member in members),
        freed_bytes=sum(member.freed_bytes for member in members),
        replay_s=sum(member.replay_s for member in members),
    )


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))


def plain_table(title: str, *words: str) -> Table:
    """A table with columns of words to begin with; the caller adds those of numbers."""
    table = _table(title)
    for heading in words:
        table.add_column(heading, overflow="fold")
    return table


def _decision(decision: Decision) -> Text:
    return Text(decision.value, style=_COLOURS[decision])
