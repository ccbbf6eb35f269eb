"""lowtide keeps the memory peak of PyTorch training under a budget, and proves that gradients are unchanged.

Where torch is not installed, what needs none is here all the same: plans, the simulator and the solvers.
"""

from __future__ import annotations

from importlib.util import find_spec as _find_spec

from lowtide import distributed, explain
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
    PolicyError,
    ReplayError,
    ReplayMismatchError,
    StepError,
    TargetError,
    TraceError,
    VerificationError,
)
from lowtide.plan import Frontier, KeptCall, Plan, PlannedRegion, Simulation, frontier, simulate, solve, trace_at
from lowtide.records import CallSite, Decision, StepTrace
from lowtide.units import Budget
from lowtide.workload import Workload

explain.__class__ = _CallableExplain

if _find_spec("torch") is not None:
    from lowtide import integrations, notebook, policy, torch_compat
    from lowtide._fit import FitResult, fit
    from lowtide.engine import Guard, is_replaying, kept_sites, name, once, original_only, register_state
    from lowtide.measure import Comparison, Measurement, MemoryWatch, measure, memory_watch
    from lowtide.policy import CheckpointWrapper, Handle, SequentialRegions, apply, checkpoint, checkpoint_sequential, fingerprint
    from lowtide.trace import trace
    from lowtide.verify import AuditReport, Diagnosis, Finding, Verification, audit, doctor, verify

    notebook.enable()

__all__ = [
    "AlreadyAppliedError",
    "AuditReport",
    "Budget",
    "BudgetError",
    "CallSite",
    "CheckpointWrapper",
    "Comparison",
    "CompileOptions",
    "CompiledFit",
    "Decision",
    "Diagnosis",
    "Finding",
    "FitResult",
    "Frontier",
    "Guard",
    "Handle",
    "InfeasibleBudgetError",
    "InputChangedError",
    "InvalidInputError",
    "KeptCall",
    "LowtideError",
    "Measurement",
    "MemoryWatch",
    "MissingExtraError",
    "Plan",
    "PlanError",
    "PlannedRegion",
    "PolicyError",
    "ReplayError",
    "ReplayMismatchError",
    "SequentialRegions",
    "Simulation",
    "StepError",
    "StepTrace",
    "TargetError",
    "TraceError",
    "Verification",
    "VerificationError",
    "Workload",
    "apply",
    "audit",
    "checkpoint",
    "checkpoint_sequential",
    "compile_options",
    "distributed",
    "doctor",
    "explain",
    "fingerprint",
    "fit",
    "fit_compiled",
    "frontier",
    "integrations",
    "is_replaying",
    "kept_sites",
    "measure",
    "memory_watch",
    "name",
    "once",
    "original_only",
    "policy",
    "register_state",
    "simulate",
    "solve",
    "torch_compat",
    "trace",
    "trace_at",
    "verify",
]


_COMPILED = ("CompileOptions", "CompiledFit", "compile_options", "fit_compiled")


def __getattr__(name: str) -> object:
    if name in _COMPILED and _find_spec("torch") is not None:
        from lowtide import compiled

        return getattr(compiled, name)
    if name in __all__:
        raise MissingExtraError(f"lowtide.{name} needs PyTorch, which is not installed: pip install torch")
    raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
