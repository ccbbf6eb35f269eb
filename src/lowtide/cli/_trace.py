"""``lowtide trace``: record a step, for `explain`, `report` and planning elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lowtide.cli._failures import reported
from lowtide.cli._fit import TARGET
from lowtide.cli._outputs import refuse_unwritable
from lowtide.cli._streams import output_kept_clean, progress
from lowtide.cli._traced import How, traced
from lowtide.explain import peak
from lowtide.records import StepTrace
from lowtide.report import plain, trace_summary_table

_GPU = "With --fake for cuda, whose data sheet gives the times: h100, a100-80gb, l4, …"


def trace(
    target: Annotated[str, typer.Argument(help=TARGET, show_default=False)],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the trace to this file.", show_default=False)] = None,
    fake: Annotated[bool, typer.Option("--fake", help="Run the step under fake tensors: nothing of its size is allocated.")] = False,
    device: Annotated[str | None, typer.Option(help="With --fake, what to trace for: cpu or cuda.", show_default=False)] = None,
    gpu: Annotated[str | None, typer.Option(help=_GPU, show_default=False)] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Keep what autograd saves off the device meanwhile.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the main figures for machines on standard output.")] = False,
) -> None:
    """Record one step: ops, storages, what autograd saves, and the module calls that could be replayed."""
    with reported():
        refuse_unwritable("--out", out)
        with output_kept_clean():
            found, subject = traced(target, How(offload, fake, device, gpu))
        if out is not None:
            found.save(out)
            progress()(f"wrote {out}")
        if as_json:
            print(json.dumps({"target": subject.name, **summary(found)}, indent=2))
            return
        Console().print(trace_summary_table(found, subject))


def summary(found: StepTrace) -> dict[str, Any]:
    """The main figures of a trace."""
    top = peak(found)
    return {
        "device": found.device,
        "fingerprint": found.fingerprint,
        "ops": len(found.ops),
        "storages": len(found.storages),
        "saved": len(found.saved),
        "calls": len(found.calls),
        "step_s": top.step_s,
        "peak_bytes": top.bytes,
        "peak_phase": top.phase.value,
        "categories": {plain(category): size for category, size in top.categories},
    }
