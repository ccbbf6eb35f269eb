"""What the displays read of a fit, by shape rather than by class: ``fit`` itself stands below this package.

Nothing here needs torch at run time, so a report can be drawn wherever its records can be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lowtide.measure import Measurement
    from lowtide.plan import Plan, Simulation
    from lowtide.records import StepTrace
    from lowtide.verify import Verification


class Fitted(Protocol):
    """The outcome of one fit; ``lowtide.FitResult`` is one."""

    @property
    def plan(self) -> Plan:
        """What was decided."""

    @property
    def trace(self) -> StepTrace:
        """The step without the plan."""

    @property
    def budget_bytes(self) -> int:
        """The peak that was asked for."""

    @property
    def plain(self) -> Measurement:
        """Measured without the plan."""

    @property
    def planned(self) -> Measurement:
        """Measured with it."""

    @property
    def step_ratio(self) -> float:
        """Step time with the plan over without, from interleaved pairs."""

    @property
    def before(self) -> Simulation:
        """The traced step, without a plan."""

    @property
    def after(self) -> Simulation:
        """The step as predicted with the plan."""

    @property
    def verification(self) -> Verification:
        """Gradients with the plan against gradients without."""

    @property
    def plain_fits(self) -> bool:
        """Whether the device has room for the step without the plan, so that its peak and time were measured."""
