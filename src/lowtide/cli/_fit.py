"""``lowtide fit``: a target into a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide import _fit
from lowtide.cli._failures import reported
from lowtide.cli._outputs import refuse_other_forms, refuse_unwritable, write_report
from lowtide.cli._streams import output_kept_clean, progress
from lowtide.cli._target import loaded
from lowtide.errors import InvalidInputError
from lowtide.plan.solvers.registry import AUTO, SOLVERS, check_solver
from lowtide.report import Subject, decided, fit_table, region_table, report_dict
from lowtide.units import parse_budget, parse_slowdown

TARGET = "gpt, resnet or unet, or path/to/script.py:function or package.module:function, where the function returns a lowtide.Workload."
_BUDGET = "The peak to allow: bytes (1.5GiB, 800MB), a share of the traced peak (50%), or auto: what the device has free."

_SLOWDOWN = "Instead of a budget: how much longer the step may take (5%); the plan of the smallest peak is found."
_SOLVER = f"Ask this solver alone: {', '.join(SOLVERS)}. By default all rules of thumb, and the exact one that suits the model."


def fit(
    target: Annotated[str, typer.Argument(help=TARGET, show_default=False)],
    budget: Annotated[str | None, typer.Option("--budget", "-b", help=_BUDGET, show_default=False)] = None,
    max_slowdown: Annotated[str | None, typer.Option(help=_SLOWDOWN, show_default=False)] = None,
    solver: Annotated[str, typer.Option(help=_SOLVER)] = AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report for machines, and nothing else, on standard output.")] = False,
    plan: Annotated[Path | None, typer.Option(help="Write the plan to this file, for lowtide.apply.", show_default=False)] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the report: .html, .png for its charts, or .svg for the timeline alone.", show_default=False)
    ] = None,
    decisions: Annotated[bool, typer.Option("--decisions", help="Print a second table: what was decided for each region.")] = False,
) -> None:
    """Find the fastest plan that keeps a training step's memory peak within a budget; measure and verify it."""
    with reported():
        _check(budget, max_slowdown, solver)
        refuse_unwritable("--plan", plan)
        refuse_unwritable("--report", report)
        refuse_other_forms("--report", report)
        with output_kept_clean():
            result, subject = _fitted(target, budget, max_slowdown, solver)
        if plan is not None:
            result.plan.save(plan)
        if report is not None:
            write_report(report, result, subject)
        if as_json:
            print(json.dumps(report_dict(result, subject), indent=2, allow_nan=False))
            return
        Console().print(fit_table(result, subject))
        for note in result.notes:
            Console().print(f"note: {note}", highlight=False)
        if decisions:
            Console().print(region_table(decided(result.trace, result.plan, result.after)))


def _check(budget: str | None, max_slowdown: str | None, solver: str) -> None:
    """Before anything is loaded.

    Raises:
        InvalidInputError: no budget and no slowdown, or both; a solver that there is not.
        BudgetError: one of them cannot be read.
    """
    if (budget is None) == (max_slowdown is None):
        raise InvalidInputError("pass --budget or --max-slowdown, one of them")
    if budget is not None:
        parse_budget(budget)
    if max_slowdown is not None:
        parse_slowdown(max_slowdown)
    check_solver(solver)


def _fitted(target: str, budget: str | None, max_slowdown: str | None, solver: str) -> tuple[_fit.FitResult, Subject]:
    say = progress()
    say(f"loading {target}")
    with loaded(target) as workload:
        result = _fit.fit(workload.model, workload.step, budget, max_slowdown=max_slowdown, solver=solver, progress=say)
        result.handle.remove()
        say("done")
    return result, Subject(workload.name or target, workload.tokens_per_step)
