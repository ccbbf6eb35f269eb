"""What was found and decided, shown: terminal tables, one-file HTML, pictures, and a dictionary for machines."""

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
from lowtide.report._explained_plan import plan_explanation_table
from lowtide.report._figures import Figure, Losses, Subject, figures, headline
from lowtide.report._fitted import Fitted
from lowtide.report._html import fit_page, trace_headline, trace_page
from lowtide.report._json import FORMAT, VERSION, report_dict
from lowtide.report._picture import timeline_svg
from lowtide.report._png import bench_png, fit_png, require_png, trace_png
from lowtide.report._regions import RegionRow, decided
from lowtide.report._tables import fit_table, plan_table, region_table
from lowtide.report._trust import audit_table, diagnosis_table, verification_table

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
    "audit_table",
    "bench_dict",
    "bench_page",
    "bench_png",
    "bench_svg",
    "bench_table",
    "decided",
    "diagnosis_table",
    "explanation_dict",
    "explanation_tables",
    "figures",
    "fit_page",
    "fit_png",
    "fit_table",
    "headline",
    "out_of_memory_table",
    "plain",
    "plan_explanation_table",
    "plan_table",
    "region_table",
    "report_dict",
    "require_png",
    "timeline_svg",
    "trace_headline",
    "trace_page",
    "trace_png",
    "trace_summary_table",
    "verification_table",
]
