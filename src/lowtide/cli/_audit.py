"""``lowtide audit``: what every region does besides computing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli._chosen import PLAN, POLICY, TIMEOUT, read_plan
from lowtide.cli._failures import reported
from lowtide.cli._fit import TARGET
from lowtide.cli._processes import is_first, joined
from lowtide.cli._streams import output_kept_clean, progress
from lowtide.cli._target import loaded
from lowtide.report import Subject, audit_table, plain
from lowtide.verify import audit


def audit_command(
    target: Annotated[str, typer.Argument(help=TARGET, show_default=False)],
    plan: Annotated[Path | None, typer.Option(help=PLAN, show_default=False)] = None,
    policy: Annotated[str | None, typer.Option(help=POLICY, show_default=False)] = None,
    batches: Annotated[int, typer.Option(min=1, help="Steps that are watched.")] = 2,
    timeout: Annotated[float, typer.Option(min=1.0, help=TIMEOUT)] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found for machines on standard output.")] = False,
) -> None:
    """Say of every region what it does besides computing: what replays get right, and what is a risk."""
    with reported():
        chosen = read_plan(plan, policy)
        with output_kept_clean():
            say = progress()
            say(f"loading {target}")
            with loaded(target) as workload, joined(timeout):
                say(f"watching {batches} steps")
                found = audit(workload.model, workload.step, plan=chosen, policy=policy, batches=batches, timeout_s=timeout)
        subject = Subject(workload.name or target, workload.tokens_per_step)
        if as_json and is_first():
            print(json.dumps({"target": subject.name, **plain(found), "risks": len(found.risks)}, indent=2))
        elif is_first():
            Console().print(audit_table(found, subject))
