"""``lowtide report``: the report of a step that nothing is fitted to, as one HTML file or one picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli._failures import reported
from lowtide.cli._outputs import form_of, refuse_other_forms, refuse_unwritable, write
from lowtide.cli._streams import output_kept_clean, progress
from lowtide.cli._traced import TARGET_OR_TRACE, read_or_traced
from lowtide.explain import explain
from lowtide.report import explanation_dict, trace_headline, trace_page, trace_png


def report(
    target: Annotated[str, typer.Argument(help=TARGET_OR_TRACE, show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write: .html, or .png for its charts.")] = Path("report.html"),
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds that the solver may take for the frontier.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation for machines on standard output as well.")] = False,
) -> None:
    """Trace a step, or read a trace, and write where its memory goes as one HTML file or one picture."""
    with reported():
        refuse_unwritable("--out", out)
        refuse_other_forms("--out", out, (".html", ".png"))
        with output_kept_clean():
            trace, subject = read_or_traced(target)
        say = progress()
        say("explaining")
        found = explain(trace, time_limit_s=time_limit)
        write(out, (trace_png if form_of(out) == ".png" else trace_page)(trace, subject, found))
        say(f"wrote {out}")
        print(json.dumps(explanation_dict(found), indent=2, allow_nan=False) if as_json else trace_headline(trace))
