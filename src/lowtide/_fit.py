"""``fit``: trace, solve, apply, measure, correct, verify — the whole line in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from lowtide.engine import refuse_installed
from lowtide.errors import InfeasibleBudgetError, StepError
from lowtide.measure import Measurement, free_bytes, peak_bytes, ratio, time_in_turns
from lowtide.plan import Plan, Simulation, replayable_regions, simulate, solve
from lowtide.policy import Handle, apply
from lowtide.records import Category, StepTrace
from lowtide.trace import TrainingState, device_of, record_step
from lowtide.units import Budget, format_bytes, parse_budget
from lowtide.verify import Verification, verify_step

Progress = Callable[[str], None]


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
        return self.plain.step_s * self.after.step_s / self.before.step_s

    @property
    def replay_share(self) -> float:
        """Share of the planned step's time that went into replays."""
        return self.planned.replay_s / self.planned.step_s

    @property
    def verified(self) -> bool:
        """Whether the planned step computes what the plain step does."""
        return self.verification.equal


def fit(
    model: nn.Module,
    step: Callable[[], object],
    budget: str | int | Budget,
    *,
    rounds: int = 5,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> FitResult:
    """Find the fastest plan whose measured peak is within a budget, and install it.

    The step runs a few dozen times. Afterwards parameters, buffers, gradients, optimizer state and random state are
    as they were before the call, and the plan is installed; when anything goes wrong, nothing is.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments. For a bit-for-bit
            verification it has to compute the same from the same state: draw its data with torch's generators, or
            use one batch.
        budget: bytes (``1_500_000_000``, ``"1.5GiB"``), a share of the traced peak (``"50%"``), of the activations in
            it (``"50% of activations"``), or ``"auto"``: what the device has free.
        rounds: how many steps of each kind are timed.
        time_limit_s: how long the solver may take; then the best plan found so far is used.
        progress: told, in a few words, what is being done.

    Returns:
        Plan, measurements, verification, and the handle that removes the plan.

    Raises:
        BudgetError: the budget cannot be read.
        InfeasibleBudgetError: no plan fits; the error has the smallest budget that would.
        StepError: the step never calls backward, or the model has nothing to replay.
        AlreadyAppliedError: a plan is installed on the model already.
        Exception: whatever the step raises.
    """
    wanted = parse_budget(budget)
    refuse_installed(model.named_modules())
    start = TrainingState(model)
    try:
        return _Fitting(model, step, progress or _silent).run(wanted, rounds, time_limit_s)
    finally:
        start.restore()


def _silent(_: str) -> None:
    """Say nothing."""


class _Fitting:
    """One call of ``fit``: the steps of the line, sharing the model and its settled state."""

    def __init__(self, model: nn.Module, step: Callable[[], object], progress: Progress) -> None:
        self._model, self._step, self._say = model, step, progress
        self._device = device_of(model)

    def run(self, wanted: Budget, rounds: int, time_limit_s: float) -> FitResult:
        self._say("running a first step")
        self._step()  # optimizers make their state now, so that every later step is like any other
        settled = TrainingState(self._model)
        self._say("tracing a step")
        trace = record_step(self._model, self._step)
        settled.restore()
        _refuse_nothing_to_replay(trace)
        self._resident_bytes = sum(storage.bytes for storage in trace.storages if storage.resident)
        before = simulate(trace, None)
        budget_bytes = self._resolve(wanted, before)
        self._say("measuring the plain step")
        plain_peak = self._measured_peak()
        handle, peak = self._plan_within(trace, budget_bytes, time_limit_s)
        try:
            self._say("verifying gradients")
            verification = verify_step(self._model, self._step, handle.disabled, settled)
            self._say("timing with and without the plan")
            plain, planned, step_ratio = self._time(handle, rounds, plain_peak, peak)
        except BaseException:
            handle.remove()
            raise
        after = simulate(trace, handle.plan)
        return FitResult(handle.plan, trace, budget_bytes, plain, planned, step_ratio, before, after, verification, handle)

    def _resolve(self, wanted: Budget, before: Simulation) -> int:
        if wanted.bytes is not None:
            return wanted.bytes
        if wanted.share is not None:
            return int(before.peak_bytes * wanted.share)
        if wanted.activation_share is not None:
            live = before.moments[before.peak_moment].live_bytes
            activations = live[list(Category).index(Category.ACTIVATION)]
            return before.peak_bytes - int((1 - wanted.activation_share) * activations)
        return self._resident_bytes + free_bytes(self._device)

    def _measured_peak(self) -> int:
        return peak_bytes(self._step, self._device, self._resident_bytes)

    def _plan_within(self, trace: StepTrace, budget_bytes: int, time_limit_s: float) -> tuple[Handle, int]:
        """Solve, install and measure; where the measured peak is over, allow the solver that much less and try again."""
        allowed = budget_bytes
        while True:
            self._say(f"solving for {format_bytes(allowed)}")
            try:
                plan = solve(trace, allowed, time_limit_s=time_limit_s)
            except InfeasibleBudgetError as error:
                return self._leanest(trace, budget_bytes, error, time_limit_s)
            handle, peak = self._install_and_measure(plan)
            if peak <= budget_bytes:
                return handle, peak
            handle.remove()
            # Never less than a thousandth: the budget is reached in few rounds, or the solver finds that there is no plan left.
            allowed = min(allowed, plan.predicted_peak_bytes) - max(peak - budget_bytes, budget_bytes // 1000)

    def _install_and_measure(self, plan: Plan) -> tuple[Handle, int]:
        handle = apply(self._model, plan)
        try:
            self._say("measuring the planned step")
            return handle, self._measured_peak()
        except BaseException:
            handle.remove()
            raise

    def _leanest(self, trace: StepTrace, budget_bytes: int, error: InfeasibleBudgetError, time_limit_s: float) -> tuple[Handle, int]:
        """The plan of least peak, should it fit when measured; else an error with a budget that was measured to do."""
        handle, peak = self._install_and_measure(solve(trace, error.smallest_bytes, time_limit_s=time_limit_s))
        if peak <= budget_bytes:
            return handle, peak
        handle.remove()
        message = (
            f"no plan fits a peak of {format_bytes(budget_bytes)} ({budget_bytes} bytes): the smallest budget that would fit is "
            f"{format_bytes(peak)} ({peak} bytes)"
        )
        raise InfeasibleBudgetError(message, budget_bytes=budget_bytes, smallest_bytes=peak) from None

    def _time(self, handle: Handle, rounds: int, plain_peak: int, planned_peak: int) -> tuple[Measurement, Measurement, float]:
        def plain_step() -> None:
            with handle.disabled():
                self._step()

        replayed = handle.replay_seconds()
        plain, planned = time_in_turns([plain_step, self._step], rounds, self._device)
        replay_s = (handle.replay_seconds() - replayed) / (rounds + 1)
        return Measurement.of(plain_peak, plain), Measurement.of(planned_peak, planned, replay_s), ratio(planned, plain)


def _refuse_nothing_to_replay(trace: StepTrace) -> None:
    if not replayable_regions(trace):
        raise StepError(
            "there is nothing to replay: no module of the model makes a tensor that autograd saves for backward "
            "(what the step computes outside of the model's modules, or under another checkpointing library, cannot be planned)"
        )
