"""``lowtide demo``: the main job, on a transformer that learns the sources of Python's standard library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide._fit import FitResult, Progress, fit
from lowtide.cli._failures import FAULT, reported
from lowtide.cli._outputs import write_report
from lowtide.cli._streams import progress
from lowtide.cli._target import loaded
from lowtide.errors import InvalidInputError
from lowtide.report import Losses, Subject, fit_table
from lowtide.trace import TrainingState
from lowtide.workload import Workload

BUDGET = "50%"


def demo(
    out: Annotated[Path, typer.Option(help="Directory for plan.json, report.html and timeline.svg; made if need be.")] = Path("demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps to run without the plan, and again with it.")] = 20,
) -> None:
    """Fit a transformer into half its memory, and train it without and with the plan from one initial state.

    Ends with status 1 if a gradient or a loss differs by a single bit.
    """
    with reported():
        _make(out)
        result, subject = _run(steps)
        result.plan.save(out / "plan.json")
        write_report(out / "report.html", result, subject)
        write_report(out / "timeline.svg", result, subject)
        Console().print(fit_table(result, subject))
        Console(stderr=True).print(f"wrote {out}/plan.json, {out}/report.html and {out}/timeline.svg", highlight=False, soft_wrap=True)
    if not (result.verified and subject.losses and subject.losses.equal):
        raise typer.Exit(FAULT)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot make the directory {folder}: {error.strerror or error}") from error


def _run(steps: int) -> tuple[FitResult, Subject]:
    say = progress()
    say("building the workload: a transformer on the sources of the Python standard library")
    with loaded("gpt") as workload:
        result = fit(workload.model, workload.step, BUDGET, progress=say)
        losses = _train_twice(workload, result, steps, say)
        result.handle.remove()
    return result, Subject(workload.name, workload.tokens_per_step, losses)


def _train_twice(workload: Workload, result: FitResult, steps: int, say: Progress) -> Losses:
    start = TrainingState(workload.model)
    say(f"training {steps} steps without the plan")
    with result.handle.disabled():
        plain = _losses(workload, steps)
    start.restore()
    say(f"training the same {steps} steps with the plan")
    planned = _losses(workload, steps)
    start.restore()
    say("done")
    return Losses(plain, planned)


def _losses(workload: Workload, steps: int) -> tuple[float, ...]:
    return tuple(float(workload.step()) for _ in range(steps))  # type: ignore[arg-type]  # this workload's step returns its loss
