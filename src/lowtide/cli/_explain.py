"""``lowtide explain``: where the memory of a step goes, why, and what would help."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from lowtide.cli._failures import reported
from lowtide.cli._streams import output_kept_clean, progress
from lowtide.cli._traced import TARGET_OR_TRACE, read_or_traced
from lowtide.errors import InvalidInputError
from lowtide.explain import explain as explained
from lowtide.explain import out_of_memory, peak, why_alive
from lowtide.records import StepTrace
from lowtide.report import SECTIONS, alive_tables, explanation_dict, explanation_tables, out_of_memory_table, plain
from lowtide.units import format_bytes, parse_bytes

_SECTION = f"What to explain: {', '.join(SECTIONS)}; may be given several times. All, without it."
_WHY = "Explain instead what keeps a storage alive (its number), or the largest that a module makes (its path)."
_LIMIT = "Explain instead where the step would run out of memory, had the device only so much: 8GiB, 800MB."


def explain(
    target: Annotated[str, typer.Argument(help=TARGET_OR_TRACE, show_default=False)],
    section: Annotated[list[str] | None, typer.Option("--section", "-s", help=_SECTION, show_default=False)] = None,
    why: Annotated[str | None, typer.Option(help=_WHY, show_default=False)] = None,
    limit: Annotated[str | None, typer.Option(help=_LIMIT, show_default=False)] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds that the solver may take for the frontier.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation for machines on standard output.")] = False,
) -> None:
    """Say where the memory of a step goes, why replays free nothing where they do not, and what would help most."""
    with reported():
        sections = _sections(section)
        limit_bytes = None if limit is None else parse_bytes(limit)
        with output_kept_clean():
            trace, _ = read_or_traced(target)
        if why is not None:
            _show(*_why(trace, why), as_json=as_json)
        elif limit_bytes is not None:
            _show(*_limit(trace, limit_bytes), as_json=as_json)
        else:
            progress()("explaining")
            found = explained(trace, time_limit_s=time_limit)
            _show(explanation_tables(found, sections), explanation_dict(found, sections), as_json=as_json)


def _sections(given: list[str] | None) -> tuple[str, ...]:
    for name in given or ():
        if name not in SECTIONS:
            raise InvalidInputError(f"there is no section {name!r}: choose from {', '.join(SECTIONS)}")
    return tuple(dict.fromkeys(given or SECTIONS))


def _why(trace: StepTrace, target: str) -> tuple[RenderableType, Any]:
    lives = why_alive(trace, int(target) if target.isdigit() and not _is_path(trace, target) else target)
    return alive_tables(lives), {"alive": plain(lives)}


def _is_path(trace: StepTrace, target: str) -> bool:
    """Modules of an ``nn.Sequential`` have numbers for names."""
    return any(call.path == target for call in trace.calls)


def _limit(trace: StepTrace, limit_bytes: int) -> tuple[RenderableType, Any]:
    found = out_of_memory(trace, limit_bytes)
    if found is None:
        return f"the step fits {format_bytes(limit_bytes)}: its peak is {format_bytes(peak(trace).bytes)}", {"out_of_memory": None}
    return out_of_memory_table(found), {"out_of_memory": plain(found)}


def _show(table: RenderableType, data: Any, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(data, indent=2, allow_nan=False))
    else:
        Console().print(table)
