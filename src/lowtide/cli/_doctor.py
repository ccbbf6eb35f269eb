"""``lowtide doctor``: symptoms, with what mends them."""

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
from lowtide.report import Subject, diagnosis_table, plain
from lowtide.units import parse_bytes
from lowtide.verify import doctor

WRONG = 1
_LIMIT = "What the device has: 8GiB, 800MB. To be told what is in the way where the step needs more."


def doctor_command(
    target: Annotated[str, typer.Argument(help=TARGET, show_default=False)],
    plan: Annotated[Path | None, typer.Option(help=PLAN, show_default=False)] = None,
    policy: Annotated[str | None, typer.Option(help=POLICY, show_default=False)] = None,
    limit: Annotated[str | None, typer.Option(help=_LIMIT, show_default=False)] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help=TIMEOUT)] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings for machines on standard output.")] = False,
) -> None:
    """Look for symptoms of activation checkpointing that goes wrong. Status 1 for errors; silent where there is nothing."""
    with reported():
        chosen, limit_bytes = read_plan(plan, policy), None if limit is None else parse_bytes(limit)
        with output_kept_clean():
            say = progress()
            say(f"loading {target}")
            with loaded(target) as workload, joined(timeout):
                say("examining the step")
                found = doctor(workload.model, workload.step, plan=chosen, policy=policy, limit_bytes=limit_bytes, timeout_s=timeout)
        subject = Subject(workload.name or target, workload.tokens_per_step)
        if as_json and is_first():
            print(json.dumps({"target": subject.name, **plain(found)}, indent=2))
        elif found.findings and is_first():
            Console().print(diagnosis_table(found, subject))
    if found.errors:
        raise typer.Exit(WRONG)
