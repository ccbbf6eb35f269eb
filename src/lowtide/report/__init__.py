"""What was found and decided, shown: terminal tables, one-file HTML, a picture, and a dictionary for machines."""

from __future__ import annotations

from lowtide.report._figures import Figure, Losses, Subject, figures, headline
from lowtide.report._fitted import Fitted
from lowtide.report._html import fit_page
from lowtide.report._json import FORMAT, VERSION, report_dict
from lowtide.report._picture import timeline_svg
from lowtide.report._regions import RegionRow, decided
from lowtide.report._tables import fit_table, plan_table, region_table

__all__ = [
    "FORMAT",
    "VERSION",
    "Figure",
    "Fitted",
    "Losses",
    "RegionRow",
    "Subject",
    "decided",
    "figures",
    "fit_page",
    "fit_table",
    "headline",
    "plan_table",
    "region_table",
    "report_dict",
    "timeline_svg",
]
