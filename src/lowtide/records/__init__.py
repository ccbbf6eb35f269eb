"""The frozen records that pass between packages, and their file. No torch here: a trace can be read and planned anywhere."""

from __future__ import annotations

from lowtide.records._call_site import CallSite
from lowtide.records._records import (
    MEASURED,
    Call,
    Category,
    Decision,
    FunctionCall,
    Gather,
    Op,
    Phase,
    SavedTensor,
    StepTrace,
    Storage,
)

__all__ = [
    "MEASURED",
    "Call",
    "CallSite",
    "Category",
    "Decision",
    "FunctionCall",
    "Gather",
    "Op",
    "Phase",
    "SavedTensor",
    "StepTrace",
    "Storage",
]
