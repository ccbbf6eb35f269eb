"""What ``fit`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.measure import Measurement
from lowtide.plan import Plan, Simulation
from lowtide.policy import Handle
from lowtide.records import StepTrace
from lowtide.verify import Verification


@dataclass(frozen=True)
class FitResult:
    """A plan that was measured and verified, and is installed.

    Attributes:
        plan: what was decided.
        trace: of the plain step.
        budget_bytes: the peak that was allowed.
        plain, planned: measured without and with the plan.
        step_ratio: time with the plan over time without, median of pairs taken in turns.
        before, after: the simulated timelines without and with the plan.
        verification: the planned step against the plain one, bit for bit.
        handle: of the installed plan.
        plain_fits: the device has room for the step without a plan. Where it has not, what autograd saves was kept off the device for
            it: ``plain.peak_bytes`` is then the traced peak, and ``plain.step_s`` and ``step_ratio`` are those of such a step.
        notes: where time or peak of the first plan that was measured was off by more than 3 % from the simulation, and which term was.
    """

    plan: Plan
    trace: StepTrace
    budget_bytes: int
    plain: Measurement
    planned: Measurement
    step_ratio: float
    before: Simulation
    after: Simulation
    verification: Verification
    handle: Handle
    plain_fits: bool = True
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Measured peak with the plan, in bytes."""
        return self.planned.peak_bytes

    @property
    def step_s(self) -> float:
        """Measured time of a step with the plan, in seconds."""
        return self.planned.step_s

    @property
    def traced_peak_bytes(self) -> int:
        """Peak of the plain step by its trace, in bytes."""
        return self.before.peak_bytes

    @property
    def predicted_peak_bytes(self) -> int:
        """Peak with the plan as simulated, in bytes."""
        return self.after.peak_bytes

    @property
    def predicted_step_s(self) -> float:
        """Time of a step with the plan: the measured plain time, and the share that the simulation adds to it."""
        return self.plain.step_s * self.after.planned_s / self.before.step_s

    @property
    def replay_share(self) -> float:
        """Share of the planned step's time that went into replays."""
        return self.planned.replay_s / self.planned.step_s

    @property
    def verified(self) -> bool:
        """Whether the planned step computes what the plain step does."""
        return self.verification.equal
