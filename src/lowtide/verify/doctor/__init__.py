"""The symptoms that people have with activation checkpointing, looked for in a model and its step. One file a family of symptoms."""

from __future__ import annotations

from lowtide.verify.doctor._doctor import doctor
from lowtide.verify.doctor._finding import Diagnosis, Finding, Severity

__all__ = ["Diagnosis", "Finding", "Severity", "doctor"]
