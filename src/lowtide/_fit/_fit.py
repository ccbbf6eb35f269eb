"""``fit``: trace, solve, apply, measure, correct, verify — the whole line in one call."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from lowtide import _torch_compiler as torch_compiler
from lowtide._fit._costs import Comparison
from lowtide._fit._plain import PlainStep, runs_out_of_memory
from lowtide._fit._result import FitResult
from lowtide._fit._rivals import Timed, rival
from lowtide._fit._suspects import failing_regions, fails, without
from lowtide._fit._together import Together
from lowtide.engine import refuse_installed
from lowtide.errors import InfeasibleBudgetError, InvalidInputError, StepError
from lowtide.measure import Measurement, free_bytes, peak_bytes, ratio, time_in_turns
from lowtide.plan import Plan, PlannedRegion, Simulation, replayable_regions, simulate, smallest_budget, solve
from lowtide.plan.solvers.registry import AUTO, check_solver
from lowtide.policy import Handle, apply, switch_caches_off
from lowtide.records import Category, StepTrace
from lowtide.trace import TrainingState, device_of, record_step, trace
from lowtide.units import Budget, format_bytes, parse_budget, parse_slowdown
from lowtide.verify import Reference, Verification

Progress = Callable[[str], None]
_FEWEST_ROUNDS = 3
"""With fewer, times say too little to choose by."""
_ALIKE = 0.03
"""Of its peak, by which a step may differ from the one that was traced."""
_WITH_OTHERS = 4
"""Steps in which to look for a peak where several processes take part."""


def fit(
    model: nn.Module,
    step: Callable[[], object],
    budget: str | int | Budget | None = None,
    *,
    max_slowdown: str | float | None = None,
    rounds: int = 5,
    time_limit_s: float = 60.0,
    solver: str = AUTO,
    progress: Progress | None = None,
    stage: Hashable = None,
    timeout_s: float = 60.0,
) -> FitResult:
    """Find the fastest plan whose measured peak is within a budget, and install it.

    What was measured is compared with what was predicted. Where the time is off by more than 3 %, costs are corrected, and the plan
    that is the fastest by those is tried as well, or a rule of thumb that may be faster than what was measured; of the two, the plan that
    measured faster is returned.

    The step runs a few dozen times. Afterwards parameters, buffers, gradients, optimizer state and random state are
    as they were before the call, and the plan is installed; when anything goes wrong, nothing is.

    Under ``torchrun`` every process of the default group calls it. Among those with the same ``stage`` peaks are the largest of any and
    budgets the smallest, the process with the largest traced peak solves, and all install its plan. Where one fails, all stop with its
    error.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments. For a bit-for-bit
            verification it has to compute the same from the same state: draw its data with torch's generators, or
            use one batch.
        budget: bytes (``1_500_000_000``, ``"1.5GiB"``), a share of the traced peak (``"50%"``), of the activations in
            it (``"50% of activations"``), or ``"auto"``: what the device has free.
        max_slowdown: instead of a budget: how much longer the step may take by the simulation, ``"5%"`` or ``0.05``; the smallest
            peak to be had for that is the budget.
        rounds: how many steps of each kind are timed.
        time_limit_s: how long the solver may take; then the best plan found so far is used.
        solver: name of the only solver to ask (``lowtide fit --help`` lists them); by default what suits the model.
        progress: told, in a few words, what is being done.
        stage: in a pipeline, the number of the stage that this process runs: those with the same one have the same plan.
        timeout_s: with several processes, how long a collective of the step may wait for the others.

    Returns:
        Plan, measurements, verification, and the handle that removes the plan.

    Raises:
        BudgetError: the budget, or the slowdown, cannot be read.
        InvalidInputError: there is no such solver, or not just one of budget and slowdown was given.
        InfeasibleBudgetError: no plan fits; the error has the smallest budget that would.
        StepError: the step never calls backward, or the model has nothing to replay.
        AlreadyAppliedError: a plan is installed on the model already.
        Exception: whatever the step raises; in the other processes that is a ``StepError`` that tells of it.
    """
    together = Together(stage, timeout_s)

    def fitted() -> FitResult:
        wanted = _wanted(budget, max_slowdown)
        check_solver(solver)
        refuse_installed(model.named_modules())
        together.refuse_different({"rounds": rounds, "solver": solver, "a budget": budget is not None})
        start = TrainingState(model, step)
        caches = switch_caches_off(model, model.modules())  # the plain step must be the one that the plan is for, bit for bit
        try:
            fitting = _Fitting(model, step, progress or _silent, time_limit_s, together, solver)
            with torch_compiler.compiled_often():
                return fitting.run(wanted, rounds, start)
        finally:
            for cache in caches:
                cache.remove()
            start.restore()

    return together.run(fitted)


def _wanted(budget: str | int | Budget | None, max_slowdown: str | float | None) -> Budget | float:
    if budget is not None and max_slowdown is None:
        return parse_budget(budget)
    if budget is None and max_slowdown is not None:
        return parse_slowdown(max_slowdown)
    raise InvalidInputError("a fit needs a budget or a largest slowdown, and not both: pass one of budget and max_slowdown")


def _silent(_: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """A plan that was installed and run: its peak, as predicted and unverified where memory ran out."""

    handle: Handle
    peak_bytes: int
    verification: Verification | None

    def over(self, budget_bytes: int) -> int:
        """By how many bytes it is over a budget; by how many it is to be asked for less where nobody knows."""
        return budget_bytes // 20 if self.verification is None else self.peak_bytes - budget_bytes


class _Fitting:
    """One call of ``fit``: the steps of the line, sharing the model, its settled state and the trace.

    The trace is the one thing that changes: modules that turn out not to be replayable are marked in it.
    """

    def __init__(
        self, model: nn.Module, step: Callable[[], object], progress: Progress, time_limit_s: float, together: Together, solver: str
    ) -> None:
        self._model, self._step, self._say, self._time_limit_s = model, step, progress, time_limit_s
        self._asked, self._solver = solver, partial(solve, time_limit_s=time_limit_s, solver=solver)
        self._together = together
        self._device, self._plain = device_of(model), PlainStep(step)

    def run(self, wanted: Budget | float, rounds: int, start: TrainingState) -> FitResult:
        self._say("running a first step")
        # Optimizers make their state now, so that every later step is like any other.
        if self._together.several:
            self._plain()
        elif not self._plain.settle(start.restore, self._say):
            start.restore()
            raise self._no_room()
        gc.collect()
        settled = TrainingState(self._model, self._step)
        self._trace = self._traced(settled)
        _refuse_nothing_to_replay(self._trace)
        _refuse_other_models(self._together.of_stage(self._trace.fingerprint))
        self._resident_bytes = self._trace.resident_bytes
        before = simulate(self._trace, None)
        traced_peak = max(self._together.of_stage(before.peak_bytes))
        budget_bytes = min(self._together.of_stage(self._resolve(wanted, before, traced_peak)))
        self._say("measuring the plain step")
        plain_peak = self._measured_peak() if self._plain.fits else before.peak_bytes
        self._unlike = _said_of_shapes(before.peak_bytes, plain_peak)
        self._reference = Reference(self._model, self._plain, settled, agree=self._together.any)
        if not self._reference.repeatable:
            _warn_not_repeatable()
        first = self._timed(self._plan_within(budget_bytes), before, plain_peak, rounds)
        best = first if self._together.several else self._better_measured(first, before, budget_bytes, plain_peak, rounds)
        after = simulate(self._trace, best.handle.plan)
        measured = (budget_bytes, best.plain, best.planned, best.ratio, before, after, best.verification, best.handle)
        return FitResult(best.handle.plan, self._trace, *measured, plain_fits=self._plain.fits, notes=first.comparison.notes())

    def _timed(self, tried: _Tried, before: Simulation, plain_peak: int, rounds: int) -> Timed:
        handle = tried.handle
        assert tried.verification is not None
        try:
            self._say("timing with and without the plan")
            plain, planned, step_ratio = self._time(handle, rounds, plain_peak, tried.peak_bytes)
            self._together.gather(None)  # all of them have a plan, or none
        except BaseException:
            handle.remove()
            raise
        comparison = Comparison(before, simulate(self._trace, handle.plan), planned, step_ratio)
        return Timed(handle, tried.verification, plain, planned, step_ratio, comparison)

    def _better_measured(self, timed: Timed, before: Simulation, budget_bytes: int, plain_peak: int, rounds: int) -> Timed:
        """Of a plan that was measured and one that may be faster, the one that measures faster; that one is installed."""
        enough = self._plain.fits and rounds >= _FEWEST_ROUNDS
        other = rival(self._trace, timed, budget_bytes, self._solver, self._asked) if enough else None
        if other is None:
            return timed
        self._say(f"trying what {other.solver} finds as well")
        timed.handle.remove()
        tried = self._try(other)
        if tried is not None and tried.over(budget_bytes) <= 0:
            second = self._timed(tried, before, plain_peak, rounds)
            if second.ratio < timed.ratio:
                return second
        if tried is not None:
            tried.handle.remove()
        again = apply(self._model, timed.handle.plan)
        self._step()  # a region's first call is watched
        return replace(timed, handle=again)

    def _traced(self, settled: TrainingState) -> StepTrace:
        """Recording takes somewhat more than the step: one that just fits may have to be recorded with saved tensors kept away."""
        self._say("tracing a step")
        found: list[StepTrace] = []
        try:
            if self._together.several:
                return self._together.priced(record_step(self._model, self._step), self._device)
            if self._plain.fits and not runs_out_of_memory(lambda: found.append(record_step(self._model, self._step))):
                return found[0]
            settled.restore()
            return record_step(self._model, self._step, offload=True)
        finally:
            settled.restore()

    def _no_room(self) -> InfeasibleBudgetError:
        """What to raise where nothing fits; a step under fake tensors needs no room.

        Raises:
            StepError: the step cannot be traced so.
        """
        traced = trace(self._model, self._step, fake=True)
        smallest = smallest_budget(traced, time_limit_s=self._time_limit_s).predicted_peak_bytes
        return _infeasible(traced.resident_bytes + free_bytes(self._device), smallest)

    def _resolve(self, wanted: Budget | float, before: Simulation, traced_peak: int) -> int:
        if not isinstance(wanted, Budget):
            self._say("solving for the smallest peak that is fast enough")
            return self._solver(self._trace, max_slowdown=wanted).budget_bytes
        if wanted.bytes is not None:
            return wanted.bytes
        if wanted.share is not None:
            return int(traced_peak * wanted.share)
        if wanted.activation_share is not None:
            live = before.moments[before.peak_moment].live_bytes
            activations = live[list(Category).index(Category.ACTIVATION)]
            return before.peak_bytes - int((1 - wanted.activation_share) * activations)
        return self._resident_bytes + free_bytes(self._device)

    def _measured_peak(self) -> int:
        steps = _WITH_OTHERS if self._together.several else 1
        return max(self._together.of_stage(peak_bytes(self._step, self._device, self._resident_bytes, steps)))

    def _plan_within(self, budget_bytes: int) -> _Tried:
        """Solve, install, measure and verify, until a plan is within budget and computes what the plain step does."""
        allowed = budget_bytes
        while True:
            plan, is_leanest = self._solve(allowed, budget_bytes)
            tried = self._try(plan)
            if tried is None:
                allowed = budget_bytes
                continue
            over = tried.over(budget_bytes) > 0
            if not self._together.any(over):
                return tried
            tried.handle.remove()
            if not over:
                continue  # another stage is: all processes run the step together once more
            if is_leanest:
                raise _infeasible(budget_bytes, max(tried.peak_bytes, budget_bytes + 1), self._unlike)
            # Never less than a thousandth: the budget is reached in few rounds, or the solver finds that there is no plan left.
            allowed = min(allowed, plan.predicted_peak_bytes) - max(tried.over(budget_bytes), budget_bytes // 1000)

    def _solve(self, allowed: int, budget_bytes: int) -> tuple[Plan, bool]:
        """The fastest plan within ``allowed`` bytes, or, where there is none, the one of least peak; and whether it is that."""
        self._say(f"solving for {format_bytes(allowed)}")
        return self._together.from_leader(simulate(self._trace, None).peak_bytes, lambda: self._solved(allowed))

    def _solved(self, allowed: int) -> tuple[Plan, bool]:
        try:
            return self._solver(self._trace, allowed, progress=self._say), False
        except InfeasibleBudgetError as error:
            return self._solver(self._trace, error.smallest_bytes), True

    def _try(self, plan: Plan) -> _Tried | None:
        """Install a plan, measure and verify it; ``None`` when some of its regions were found not to be replayable."""
        handle = apply(self._model, plan)
        tried: list[_Tried] = []
        try:
            if self._together.several:
                tried.append(self._measured_and_verified(handle))
            elif runs_out_of_memory(lambda: tried.append(self._measured_and_verified(handle))):
                return _Tried(handle, plan.predicted_peak_bytes, None)
        except Exception as error:
            handle.remove()
            if self._together.several:
                raise
            self._leave_out(plan, error)
            return None
        except BaseException:
            handle.remove()
            raise
        verification = tried[0].verification
        differs = verification is not None and not verification.equal and self._reference.repeatable
        if not self._together.any(differs):
            return tried[0]
        handle.remove()
        if self._together.several and self._together.stages() > 1:
            raise StepError(
                "a plan changes what the step computes, and with plans of several stages at once the region to blame cannot be found: "
                f"look with lowtide.verify ({verification.summary if differs and verification else 'on another rank'})"
            )
        self._leave_out(plan, None)
        return None

    def _measured_and_verified(self, handle: Handle) -> _Tried:
        self._say("measuring the planned step")
        # A region's first call is watched: it keeps nothing yet, and leaves cycles behind that hold tensors.
        self._step()
        gc.collect()
        peak = self._measured_peak()
        self._say("verifying gradients")
        return _Tried(handle, peak, self._reference.compare())

    def _leave_out(self, plan: Plan, error: Exception | None) -> None:
        """Mark the regions of a failing plan that are to blame.

        Raises:
            Exception: the step's own error, when the plain step raises as well, or no region is to blame.
        """
        self._say("finding out which modules cannot be replayed")
        self._reference.compare()  # the plain step: an error of its own passes through here
        blamed = failing_regions(plan, lambda part: self._together.any(fails(self._model, part, self._reference)))
        if error is not None and (not blamed or (blamed == plan.regions and not fails(self._model, plan, self._reference))):
            raise error
        self._trace = without(self._trace, blamed)
        _warn_left_out(blamed, error)

    def _time(self, handle: Handle, rounds: int, plain_peak: int, planned_peak: int) -> tuple[Measurement, Measurement, float]:
        def plain_step() -> None:
            with handle.disabled():
                self._plain()

        plain, planned = time_in_turns([plain_step, self._step], rounds, self._device, handle.replay_seconds)
        return Measurement.of(plain_peak, plain), Measurement.of(planned_peak, planned), ratio(planned, plain)


def _infeasible(budget_bytes: int, smallest_bytes: int, why: str = "") -> InfeasibleBudgetError:
    message = (
        f"no plan fits a peak of {format_bytes(budget_bytes)} ({budget_bytes} bytes): the smallest budget that would fit is "
        f"{format_bytes(smallest_bytes)} ({smallest_bytes} bytes){why}"
    )
    return InfeasibleBudgetError(message, budget_bytes=budget_bytes, smallest_bytes=smallest_bytes)


def _said_of_shapes(traced_bytes: int, measured_bytes: int) -> str:
    """What to add to an error where the plain step was not what was traced."""
    if abs(measured_bytes - traced_bytes) <= _ALIKE * traced_bytes:
        return ""
    return (
        f". The step without a plan had a peak of {format_bytes(traced_bytes)} when it was traced and of {format_bytes(measured_bytes)} "
        "the next time: its shapes seem to change from step to step. A plan is for one shape: give fit a step that always takes the "
        "largest batch, or several plans, each for its own"
    )


def _refuse_nothing_to_replay(trace: StepTrace) -> None:
    if not replayable_regions(trace):
        raise StepError(
            "there is nothing to replay: no module of the model makes a tensor that autograd saves for backward "
            "(what the step computes outside of the model's modules, or under another checkpointing library, cannot be planned)"
        )


def _refuse_other_models(fingerprints: list[str]) -> None:
    if len(set(fingerprints)) > 1:
        raise StepError(
            "processes that are to install the same plan have models of different structure: in a pipeline, pass the number of the stage "
            "that each process runs as stage="
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
