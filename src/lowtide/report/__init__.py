"""What was found and decided, shown: terminal tables, one-file HTML, a picture, and a dictionary for machines."""

from __future__ import annotations

from lowtide.report._bench import BenchRow, bench_dict, bench_page, bench_svg, bench_table
from lowtide.report._explained import (
    SECTIONS,
    alive_tables,
    explanation_dict,
    explanation_tables,
    out_of_memory_table,
    plain,
    trace_summary_table,
)
from lowtide.report._figures import Figure, Losses, Subject, figures, headline
from lowtide.report._fitted import Fitted
from lowtide.report._html import fit_page, trace_headline, trace_page
from lowtide.report._json import FORMAT, VERSION, report_dict
from lowtide.report._picture import timeline_svg
from lowtide.report._regions import RegionRow, decided
from lowtide.report._tables import fit_table, plan_table, region_table

__all__ = [
    "FORMAT",
    "SECTIONS",
    "VERSION",
    "BenchRow",
    "Figure",
    "Fitted",
    "Losses",
    "RegionRow",
    "Subject",
    "alive_tables",
    "bench_dict",
    "bench_page",
    "bench_svg",
    "bench_table",
    "decided",
    "explanation_dict",
    "explanation_tables",
    "figures",
    "fit_page",
    "fit_table",
    "headline",
    "out_of_memory_table",
    "plain",
    "plan_table",
    "region_table",
    "report_dict",
    "timeline_svg",
    "trace_headline",
    "trace_page",
    "trace_summary_table",
]
