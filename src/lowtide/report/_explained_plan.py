"""Tables of why a plan decides as it does."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from lowtide.explain import PlanExplanation, RegionChoice, Upgrade
from lowtide.plan import KeptCall
from lowtide.report._tables import plain_table
from lowtide.report._timeline import region_name
from lowtide.units import format_bytes, format_seconds


def plan_explanation_table(found: PlanExplanation) -> RenderableType:
    """A row for each region: what it keeps, frees and takes, and what the next bytes would buy there."""
    table = plain_table("why the plan decides so", "region", "kept")
    for heading in ("frees at the peak", "takes"):
        table.add_column(heading, justify="right")
    table.add_column("the next bytes would buy", overflow="fold")
    for choice in found.regions:
        kept = ", ".join(map(_call, choice.kept)) or ("nothing" if choice.first_saved is None else f"all after {choice.first_saved} saved")
        table.add_row(
            Text(region_name(choice.paths)), kept, format_bytes(choice.frees_bytes), format_seconds(choice.seconds), _next(choice)
        )
    table.caption, table.caption_justify = Text("\n".join(_summary(found))), "left"
    return table


def _summary(found: PlanExplanation) -> list[str]:
    peaks = f"peak {format_bytes(found.peak_bytes)} of {format_bytes(found.plain_peak_bytes)}"
    times = f"step {format_seconds(found.step_s)} for {format_seconds(found.plain_step_s)}"
    most = found.next and f"most for a byte: {region_name(found.next.region)}, {_upgrade(found.next)}"
    return [f"{peaks}, {times}", *([most] if most else [])]


def _next(choice: RegionChoice) -> str:
    return _upgrade(choice.next) if choice.next else "nothing: it is as fast as it can be"


def _upgrade(upgrade: Upgrade) -> str:
    how = f"keep {_call(upgrade.keep)}" if upgrade.keep else "no replay"
    price = f"{format_seconds(upgrade.seconds)} for {format_bytes(upgrade.bytes)}"
    return f"{how}: {price}" if upgrade.bytes else f"{how}: {format_seconds(upgrade.seconds)}, for nothing by itself"


def _call(call: KeptCall) -> str:
    return f"{call.module.rpartition('.')[2] or 'model'}.{call.function.rpartition('.')[2]}"
