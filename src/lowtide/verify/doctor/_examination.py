"""Everything that is asked of a model before it is judged: runs and traces of its step, plain and as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from lowtide.explain import Peak, is_inside, peak
from lowtide.records import Op, Phase, StepTrace
from lowtide.verify._result import ReplayDifference, Verification
from lowtide.verify.audit import AuditReport
from lowtide.verify.doctor._look import Look


@dataclass(frozen=True)
class Examination:
    """What was found out. Without regions that run only ``look`` and ``limit_bytes`` are there, and ``plain`` where there is a limit.

    Attributes:
        model, step: under examination.
        look: one run of the step as it is.
        limit_bytes: what the device has, where it is known.
        plain: trace of the step with all checkpointing switched off.
        as_it_is: trace of the step with it.
        verification: the one against the other.
        audit: of the regions.
        replays: where the step fails, the first ops whose replays differ, as far as that can be told.
    """

    model: nn.Module
    step: Callable[[], object]
    look: Look
    limit_bytes: int | None = None
    plain: StepTrace | None = None
    as_it_is: StepTrace | None = None
    verification: Verification | None = None
    audit: AuditReport | None = None
    replays: tuple[ReplayDifference, ...] = ()

    @cached_property
    def plain_peak(self) -> Peak | None:
        """The moment of most bytes without checkpointing."""
        return None if self.plain is None else peak(self.plain)

    @cached_property
    def peak(self) -> Peak | None:
        """The moment of most bytes of the step as it is."""
        return None if self.as_it_is is None else peak(self.as_it_is)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of the modules that are regions, those inside others left out."""
        called = set() if self.plain is None else {call.path for call in self.plain.calls}
        names = [end for run in self.look.regions.values() for end in run.name.split(" … ")]
        found = dict.fromkeys(name for name in names if name in called)
        return tuple(path for path in found if not any(path != outer and is_inside(path, outer) for outer in found))

    def in_regions(self, trace: StepTrace, call: int | None) -> str | None:
        """The region that a call of a trace is in; ``None`` outside of all."""
        if call is None:
            return None
        path = trace.calls[call].path
        return next((region for region in self.paths if is_inside(path, region)), None)

    def forward_of(self, trace: StepTrace) -> dict[str | None, list[Op]]:
        """The ops of a trace's forward, by region; under ``None`` those outside of all."""
        found: dict[str | None, list[Op]] = {}
        for op in trace.ops:
            if op.phase is Phase.FORWARD:
                found.setdefault(self.in_regions(trace, op.call), []).append(op)
        return found
