"""Fits and traces as notebooks show them: a table of the main figures, and the report to unfold.

IPython is told of the formatters where it runs already, so ``import lowtide`` in a notebook is enough; elsewhere this costs one
look at ``sys.modules``. ``%load_ext lowtide.notebook`` does the same by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide._fit import FitResult
    from lowtide.records import StepTrace

__all__ = ["enable", "fit_html", "load_ipython_extension", "trace_html"]

_HEIGHT = 640
_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"
_CELL = "padding:3px 12px 3px 0;text-align:left"


def enable() -> bool:
    """Register the displays with the IPython that runs, if one does.

    Returns:
        Whether there was one.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None:
        return False
    load_ipython_extension(shell)
    return True


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext lowtide.notebook`` calls."""
    from lowtide._fit import FitResult
    from lowtide.records import StepTrace

    html = shell.display_formatter.formatters["text/html"]
    html.for_type(FitResult, fit_html)
    html.for_type(StepTrace, trace_html)


def fit_html(fit: FitResult) -> str:
    """The main figures of a fit, with the report behind a fold."""
    from lowtide.report import Subject, figures, fit_page, headline

    rows = [("", "without the plan", "with the plan", "")]
    rows += [(row.name, row.plain, row.planned, row.change) for row in figures(fit, Subject())]
    return f"<p>{escape(headline(fit))}</p>{_table(rows)}{_folded(fit_page(fit, Subject()))}"


def trace_html(trace: StepTrace) -> str:
    """The main figures of a trace, with the report behind a fold."""
    from lowtide.report import Subject, trace_headline, trace_page

    counts = [(name, f"{len(records):,}") for name, records in (("ops", trace.ops), ("saved tensors", trace.saved))]
    return f"<p>{escape(trace_headline(trace))}</p>{_table(counts)}{_folded(trace_page(trace, Subject('this step')))}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    cells = ("".join(f'<td style="{_CELL}">{escape(text)}</td>' for text in row) for row in rows)
    return f'<table style="{_TABLE}">{"".join(f"<tr>{row}</tr>" for row in cells)}</table>'


def _folded(page: str) -> str:
    """The page in a frame of its own, so that its styles and scripts stay there; it is loaded when it is unfolded."""
    frame = (
        f'<iframe srcdoc="{escape(page)}" loading="lazy" style="width:100%;height:{_HEIGHT}px;border:0" sandbox="allow-scripts"></iframe>'
    )
    return f"<details><summary>Report</summary>{frame}</details>"
