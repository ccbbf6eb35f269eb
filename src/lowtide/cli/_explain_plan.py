"""``lowtide explain-plan``: for each region of a plan what is kept, why, and what the next byte would buy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli._failures import reported
from lowtide.cli._traced import TARGET_OR_TRACE, read_or_traced
from lowtide.explain import explain_plan
from lowtide.plan import Plan
from lowtide.report import plain, plan_explanation_table


def explain_plan_command(
    plan: Annotated[Path, typer.Argument(help="A file that `lowtide fit --plan` or `Plan.save` wrote.", show_default=False)],
    target: Annotated[str, typer.Argument(help=TARGET_OR_TRACE, show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation for machines on standard output.")] = False,
) -> None:
    """Say for each region of a plan what it keeps, frees and takes, and what the next bytes of budget would buy."""
    with reported():
        read = Plan.load(plan)
        trace, _ = read_or_traced(target)
        found = explain_plan(trace, read)
        if as_json:
            print(json.dumps(plain(found), indent=2, allow_nan=False))
        else:
            Console().print(plan_explanation_table(found))
