"""Every error that lowtide raises on purpose.

    LowtideError
    ├── InvalidInputError (ValueError)
    │   ├── BudgetError                a budget that cannot be read
    │   ├── TargetError                a command-line target that is missing or of the wrong kind
    │   ├── StepError                  a step that cannot be traced (no backward, nothing to replay)
    │   ├── TraceError                 a trace file that is damaged or of another version
    │   ├── PlanError                  a plan file that is damaged, of another version, or for another model
    │   └── PolicyError                a policy that decides nothing, or chooses modules that are not there
    ├── InfeasibleBudgetError          no plan fits the budget
    ├── AlreadyAppliedError            a plan or policy is already installed on this model
    ├── MissingExtraError (ImportError) an optional library is not installed
    ├── VerificationError              a planned step did not compute what the plain step computes
    └── ReplayError (RuntimeError)
        ├── ReplayMismatchError        a replay did not do what the forward did
        └── InputChangedError          a tensor that the replay needs was changed after the forward

Errors of the user's own code pass through unchanged.
"""

from __future__ import annotations


class LowtideError(Exception):
    """Base of every error that lowtide raises on purpose."""


class InvalidInputError(LowtideError, ValueError):
    """Something that was passed in cannot be used; the message says what was required."""


class BudgetError(InvalidInputError):
    """A budget that cannot be read as bytes, a share or ``auto``."""


class TargetError(InvalidInputError):
    """A command-line target that is missing, has no such function, or is of the wrong kind."""


class StepError(InvalidInputError):
    """A step that cannot be used: it never calls backward, or has nothing to replay."""


class TraceError(InvalidInputError):
    """A trace file that cannot be read or written: missing, damaged, or of another version."""


class PlanError(InvalidInputError):
    """A plan that is damaged, of another version, or made for another model."""


class PolicyError(InvalidInputError):
    """A policy whose rule matched nothing or returned no decision, or that chooses modules which the model does not have."""


class InfeasibleBudgetError(LowtideError):
    """No plan keeps the peak under the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_bytes: the smallest budget that some plan meets.
    """

    def __init__(self, message: str, *, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class AlreadyAppliedError(LowtideError):
    """A plan or policy is installed on this model already; remove it first."""


class MissingExtraError(LowtideError, ImportError):
    """An optional library is not installed; the message names the install command."""


class VerificationError(LowtideError):
    """A planned step did not compute what the plain step computes."""


class ReplayError(LowtideError, RuntimeError):
    """A region could not be replayed in backward."""


class ReplayMismatchError(ReplayError):
    """A replay did not save the tensors that the forward saved.

    Attributes:
        region: its name.
        op: in forward, the op that saved the first tensor that differs; empty where it is not known.
        source: the user's line that called it, ``file.py:12``; empty where it is not known.
    """

    def __init__(self, message: str, *, region: str = "", op: str = "", source: str = "") -> None:
        super().__init__(message)
        self.region, self.op, self.source = region, op, source


class InputChangedError(ReplayError):
    """A tensor that a replay needs was modified in place after the forward."""
