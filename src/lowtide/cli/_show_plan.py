"""``lowtide show-plan``: what a saved plan decides, and whether it is for this model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli._failures import reported
from lowtide.cli._streams import output_kept_clean
from lowtide.cli._target import loaded
from lowtide.plan import Plan
from lowtide.policy import apply
from lowtide.report import plan_table


def show_plan(
    plan: Annotated[Path, typer.Argument(help="A file that `lowtide fit --plan` or `Plan.save` wrote.", show_default=False)],
    target: Annotated[str | None, typer.Argument(help="Check that the plan is for the model of this target.", show_default=False)] = None,
) -> None:
    """Print a saved plan as a table; with a target, check first that it was made for that model."""
    with reported():
        read = Plan.load(plan)
        if target is not None:
            _check(read, target)
        Console().print(plan_table(read, str(plan)))


def _check(plan: Plan, target: str) -> None:
    with output_kept_clean(), loaded(target) as workload:
        apply(workload.model, plan).remove()
