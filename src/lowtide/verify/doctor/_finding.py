"""What the doctor found, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How bad it is."""

    ERROR = "error"
    """Gradients are wrong, or the step fails."""
    WARNING = "warning"
    """Memory or time is spent for nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One symptom.

    Attributes:
        symptom: a short name that stays the same: ``"reentrant, frozen inputs"``.
        severity: see there.
        what: a sentence about this model.
        evidence: what was seen in it.
        mend: the command or line that mends it.
    """

    symptom: str
    severity: Severity
    what: str
    evidence: str
    mend: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about a step, errors first; none where nothing is wrong.

    Attributes:
        findings: of all processes, each once.
        ranks: how many findings each process had, where there are several.
    """

    findings: tuple[Finding, ...]
    ranks: tuple[int, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Those that mean wrong gradients, or a step that fails."""
        return tuple(f for f in self.findings if f.severity is Severity.ERROR)

    def report(self) -> str:
        """The findings in words; empty where there are none."""
        return "\n".join(f"{f.severity.value}: {f.symptom}: {f.what}\n  seen: {f.evidence}\n  mend: {f.mend}" for f in self.findings)
