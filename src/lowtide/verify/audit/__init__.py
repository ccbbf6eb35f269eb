"""What every region of a step does besides computing, and whether its replay is right all the same."""

from __future__ import annotations

from lowtide.verify.audit._audit import audit
from lowtide.verify.audit._records import AuditReport, Kind, Observation, RegionAudit

__all__ = ["AuditReport", "Kind", "Observation", "RegionAudit", "audit"]
