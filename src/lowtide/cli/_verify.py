"""``lowtide verify``: does checkpointing change what the step computes?"""

from __future__ import annotations

import json
from dataclasses import dataclass
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
from lowtide.plan import Plan
from lowtide.report import Subject, plain, verification_table
from lowtide.verify import Verification, verify

DIFFERENT = 1


@dataclass(frozen=True)
class Options:
    """What ``lowtide.verify`` is called with."""

    plan: Plan | None
    policy: str | None
    steps: int
    three_way: bool
    timeout_s: float


def verify_command(
    target: Annotated[str, typer.Argument(help=TARGET, show_default=False)],
    plan: Annotated[Path | None, typer.Option(help=PLAN, show_default=False)] = None,
    policy: Annotated[str | None, typer.Option(help=POLICY, show_default=False)] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps that are compared.")] = 3,
    three_way: Annotated[bool, typer.Option("--three-way", help="FP32, autocast, and autocast with checkpointing.")] = False,
    timeout: Annotated[float, typer.Option(min=1.0, help=TIMEOUT)] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict for machines on standard output.")] = False,
) -> None:
    """Compare a checkpointed step with the plain one, bit for bit where its ops are deterministic. Status 1 if they differ."""
    with reported():
        options = Options(read_plan(plan, policy), policy, steps, three_way, timeout)
        with output_kept_clean():
            found, subject = _verified(target, options)
        if as_json and is_first():
            print(json.dumps({"target": subject.name, **plain(found), "report": found.report()}, indent=2))
        elif is_first():
            Console().print(verification_table(found, subject))
    if not found.equal:
        raise typer.Exit(DIFFERENT)


def _verified(target: str, options: Options) -> tuple[Verification, Subject]:
    say = progress()
    say(f"loading {target}")
    with loaded(target) as workload, joined(options.timeout_s):
        say("comparing the plain step with the checkpointed one")
        found = verify(workload.model, workload.step, **vars(options))
        say("done")
    return found, Subject(workload.name or target, workload.tokens_per_step)
