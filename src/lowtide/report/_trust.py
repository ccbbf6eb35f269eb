"""What verify, audit and doctor found, as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from lowtide.report._figures import Subject
from lowtide.report._tables import plain_table

if TYPE_CHECKING:
    from lowtide.verify import AuditReport, Diagnosis, Verification

_MOST_NAMES = 6


def verification_table(found: Verification, subject: Subject) -> Table:
    """The verdict, and what it rests on."""
    table = plain_table(f"{subject.title}: {'equal' if found.equal else 'DIFFERENT'}", "", "")
    regions = f"{len(found.regions)}: {_shown(found.regions)}" if found.regions else "—"
    rows = [
        ("regions that ran", regions),
        ("compared", f"{found.compared} tensors, {found.gradients} of them gradients, over {found.steps} steps"),
        ("the plain step repeats itself", "yes, bit for bit" if found.repeatable else "no"),
    ]
    if found.different:
        rows.append(("different", _shown(found.different)))
    for name, value in rows:
        table.add_row(name, Text(value))
    table.caption, table.caption_justify = Text(found.report()), "left"
    return table


def audit_table(found: AuditReport, subject: Subject) -> Table:
    """What regions do, regions that do the same together; risks in red."""
    table = plain_table(f"{subject.title}: {len(found.risks)} risks in {len(found.regions)} regions", "region", "what it does", "", "")
    groups: dict[tuple[str, bool, str], dict[str, dict[str, None]]] = {}
    for region in found.regions:
        for o in region.observations:
            groups.setdefault((o.kind.value, o.handled, o.how), {}).setdefault(region.region, {}).setdefault(o.what)
    for (kind, handled, how), regions in sorted(groups.items(), key=lambda entry: entry[0][1]):
        whats = tuple(dict.fromkeys(what for seen in regions.values() for what in seen))
        style = None if handled else "bold red"
        table.add_row(Text(_shown(tuple(regions))), Text(f"{kind}: {_shown(whats)}"), "handled" if handled else "RISK", how, style=style)
    _caption(table, found.ranks, "risks")
    return table


def diagnosis_table(found: Diagnosis, subject: Subject) -> Table:
    """Each finding with its evidence and what mends it."""
    table = plain_table(f"{subject.title}: {len(found.findings)} findings", "symptom", "what was found", "what mends it")
    for f in found.findings:
        style = "bold red" if f in found.errors else None
        table.add_row(Text(f.symptom), Text(f"{f.what}\nseen: {f.evidence}"), Text(f.mend), style=style, end_section=True)
    _caption(table, found.ranks, "findings")
    return table


def _caption(table: Table, ranks: tuple[int, ...], what: str) -> None:
    """How many each process had, where there are several."""
    if ranks:
        table.caption, table.caption_justify = "; ".join(f"rank {rank}: {count} {what}" for rank, count in enumerate(ranks)), "left"


def _shown(names: tuple[str, ...]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
