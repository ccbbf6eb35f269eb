"""From a model, a step and a budget to an installed plan that was measured and verified."""

from __future__ import annotations

from lowtide._fit._fit import Progress, fit
from lowtide._fit._result import FitResult

__all__ = ["FitResult", "Progress", "fit"]
