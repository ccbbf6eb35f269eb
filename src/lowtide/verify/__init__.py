"""Prove that a plan changes nothing but memory and time."""

from __future__ import annotations

from lowtide.verify._difference import Difference
from lowtide.verify._observe import same_bits
from lowtide.verify._ranks import Ranks
from lowtide.verify._reference import Reference
from lowtide.verify._result import Precision, ReplayDifference, Verification
from lowtide.verify._verify import verify
from lowtide.verify.audit import AuditReport, audit
from lowtide.verify.doctor import Diagnosis, Finding, doctor

__all__ = [
    "AuditReport",
    "Diagnosis",
    "Difference",
    "Finding",
    "Precision",
    "Ranks",
    "Reference",
    "ReplayDifference",
    "Verification",
    "audit",
    "doctor",
    "same_bits",
    "verify",
]
