"""lowtide keeps the memory peak of PyTorch training under a budget, and proves that gradients are unchanged.

Where torch is not installed, what needs none is here all the same: plans, the simulator and the solvers.
"""

from __future__ import annotations

from importlib.util import find_spec as _find_spec

from lowtide import explain
from lowtide._explain import CallableExplain as _CallableExplain
from lowtide.errors import (
    AlreadyAppliedError,
    BudgetError,
    InfeasibleBudgetError,
    InputChangedError,
    InvalidInputError,
    LowtideError,
    MissingExtraError,
    PlanError,
    ReplayError,
    ReplayMismatchError,
    StepError,
    TargetError,
    TraceError,
    VerificationError,
)
from lowtide.plan import Plan, PlannedRegion, Simulation, simulate, solve
from lowtide.records import Decision, StepTrace
from lowtide.units import Budget
from lowtide.workload import Workload

explain.__class__ = _CallableExplain

if _find_spec("torch") is not None:
    from lowtide import notebook, torch_compat
    from lowtide._fit import FitResult, fit
    from lowtide.engine import Guard, checkpoint, is_replaying, once, original_only, register_state
    from lowtide.measure import Comparison, Measurement, MemoryWatch, measure, memory_watch
    from lowtide.policy import Handle, apply, fingerprint
    from lowtide.trace import trace
    from lowtide.verify import Verification

    notebook.enable()

__all__ = [
    "AlreadyAppliedError",
    "Budget",
    "BudgetError",
    "Comparison",
    "Decision",
    "FitResult",
    "Guard",
    "Handle",
    "InfeasibleBudgetError",
    "InputChangedError",
    "InvalidInputError",
    "LowtideError",
    "Measurement",
    "MemoryWatch",
    "MissingExtraError",
    "Plan",
    "PlanError",
    "PlannedRegion",
    "ReplayError",
    "ReplayMismatchError",
    "Simulation",
    "StepError",
    "StepTrace",
    "TargetError",
    "TraceError",
    "Verification",
    "VerificationError",
    "Workload",
    "apply",
    "checkpoint",
    "explain",
    "fingerprint",
    "fit",
    "is_replaying",
    "measure",
    "memory_watch",
    "once",
    "original_only",
    "register_state",
    "simulate",
    "solve",
    "torch_compat",
    "trace",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        raise MissingExtraError(f"lowtide.{name} needs PyTorch, which is not installed: pip install torch")
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
