"""``fit``: trace, solve, apply, measure, correct, verify — the whole line in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from lowtide._fit._result import FitResult
from lowtide._fit._suspects import failing_regions, fails, without
from lowtide.engine import refuse_installed
from lowtide.errors import InfeasibleBudgetError, StepError
from lowtide.measure import Measurement, free_bytes, peak_bytes, ratio, time_in_turns
from lowtide.plan import Plan, PlannedRegion, Simulation, replayable_regions, simulate, solve
from lowtide.policy import Handle, apply
from lowtide.records import Category, StepTrace
from lowtide.trace import TrainingState, device_of, record_step
from lowtide.units import Budget, format_bytes, parse_budget
from lowtide.verify import Reference, Verification

Progress = Callable[[str], None]


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
    start = TrainingState(model, step)
    try:
        return _Fitting(model, step, progress or _silent, time_limit_s).run(wanted, rounds)
    finally:
        start.restore()


def _silent(_: str) -> None:
    """Say nothing."""


class _Fitting:
    """One call of ``fit``: the steps of the line, sharing the model, its settled state and the trace.

    The trace is the one thing that changes: modules that turn out not to be replayable are marked in it.
    """

    def __init__(self, model: nn.Module, step: Callable[[], object], progress: Progress, time_limit_s: float) -> None:
        self._model, self._step, self._say, self._time_limit_s = model, step, progress, time_limit_s
        self._device = device_of(model)

    def run(self, wanted: Budget, rounds: int) -> FitResult:
        self._say("running a first step")
        self._step()  # optimizers make their state now, so that every later step is like any other
        settled = TrainingState(self._model, self._step)
        self._say("tracing a step")
        self._trace = record_step(self._model, self._step)
        settled.restore()
        _refuse_nothing_to_replay(self._trace)
        self._resident_bytes = sum(storage.bytes for storage in self._trace.storages if storage.resident)
        before = simulate(self._trace, None)
        budget_bytes = self._resolve(wanted, before)
        self._say("measuring the plain step")
        plain_peak = self._measured_peak()
        self._reference = Reference(self._model, self._step, settled)
        if not self._reference.repeatable:
            _warn_not_repeatable()
        handle, peak, verification = self._plan_within(budget_bytes)
        try:
            self._say("timing with and without the plan")
            plain, planned, step_ratio = self._time(handle, rounds, plain_peak, peak)
        except BaseException:
            handle.remove()
            raise
        after = simulate(self._trace, handle.plan)
        return FitResult(handle.plan, self._trace, budget_bytes, plain, planned, step_ratio, before, after, verification, handle)

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

    def _plan_within(self, budget_bytes: int) -> tuple[Handle, int, Verification]:
        """Solve, install, measure and verify, until a plan is within budget and computes what the plain step does."""
        allowed = budget_bytes
        while True:
            plan, is_leanest = self._solve(allowed, budget_bytes)
            tried = self._try(plan)
            if tried is None:
                allowed = budget_bytes
                continue
            handle, peak, _ = tried
            if peak <= budget_bytes:
                return tried
            handle.remove()
            if is_leanest:
                raise _infeasible(budget_bytes, peak)
            # Never less than a thousandth: the budget is reached in few rounds, or the solver finds that there is no plan left.
            allowed = min(allowed, plan.predicted_peak_bytes) - max(peak - budget_bytes, budget_bytes // 1000)

    def _solve(self, allowed: int, budget_bytes: int) -> tuple[Plan, bool]:
        """The fastest plan within ``allowed`` bytes, or, where there is none, the one of least peak; and whether it is that."""
        self._say(f"solving for {format_bytes(allowed)}")
        try:
            return solve(self._trace, allowed, time_limit_s=self._time_limit_s), False
        except InfeasibleBudgetError as error:
            return solve(self._trace, error.smallest_bytes, time_limit_s=self._time_limit_s), True

    def _try(self, plan: Plan) -> tuple[Handle, int, Verification] | None:
        """Install a plan, measure and verify it; ``None`` when some of its regions were found not to be replayable."""
        handle = apply(self._model, plan)
        try:
            self._say("measuring the planned step")
            peak = self._measured_peak()
            self._say("verifying gradients")
            verification = self._reference.compare()
        except Exception as error:
            handle.remove()
            self._leave_out(plan, error)
            return None
        except BaseException:
            handle.remove()
            raise
        if verification.equal or not self._reference.repeatable:
            return handle, peak, verification
        handle.remove()
        self._leave_out(plan, None)
        return None

    def _leave_out(self, plan: Plan, error: Exception | None) -> None:
        """Mark the regions of a failing plan that are to blame.

        Raises:
            Exception: the step's own error, when the plain step raises as well, or no region is to blame.
        """
        self._say("finding out which modules cannot be replayed")
        self._reference.compare()  # the plain step: an error of its own passes through here
        blamed = failing_regions(plan, lambda part: fails(self._model, part, self._reference))
        if error is not None and (not blamed or (blamed == plan.regions and not fails(self._model, plan, self._reference))):
            raise error
        self._trace = without(self._trace, blamed)
        _warn_left_out(blamed, error)

    def _time(self, handle: Handle, rounds: int, plain_peak: int, planned_peak: int) -> tuple[Measurement, Measurement, float]:
        def plain_step() -> None:
            with handle.disabled():
                self._step()

        replayed = handle.replay_seconds()
        plain, planned = time_in_turns([plain_step, self._step], rounds, self._device)
        replay_s = (handle.replay_seconds() - replayed) / (rounds + 1)
        return Measurement.of(plain_peak, plain), Measurement.of(planned_peak, planned, replay_s), ratio(planned, plain)


def _infeasible(budget_bytes: int, smallest_bytes: int) -> InfeasibleBudgetError:
    message = (
        f"no plan fits a peak of {format_bytes(budget_bytes)} ({budget_bytes} bytes): the smallest budget that would fit is "
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes)"
    )
    return InfeasibleBudgetError(message, budget_bytes=budget_bytes, smallest_bytes=smallest_bytes)


def _refuse_nothing_to_replay(trace: StepTrace) -> None:
    if not replayable_regions(trace):
        raise StepError(
            "there is nothing to replay: no module of the model makes a tensor that autograd saves for backward "
            "(what the step computes outside of the model's modules, or under another checkpointing library, cannot be planned)"
        )


def _warn_not_repeatable() -> None:
    warnings.warn(
        "the plain step does not repeat itself: run twice from the same state it computes different values, so a plan can only be compared "
        "within that difference. Draw data with torch's, Python's or NumPy's generators, or use one batch, to have it proved bit for bit",
        stacklevel=4,
    )


def _warn_left_out(regions: tuple[PlannedRegion, ...], error: Exception | None) -> None:
    names = ", ".join(" … ".join(dict.fromkeys((region.paths[0], region.paths[-1]))) for region in regions)
    why = "a replay computes something else there" if error is None else f"{type(error).__name__}: {error}"
    warnings.warn(f"the plan leaves out modules that cannot be replayed: {names} ({why})", stacklevel=5)
