"""Measured against simulated: which term was wrong, and costs that would have been right."""

from __future__ import annotations

import pytest
from tests.plan._traces import block_chain

from lowtide._fit._costs import Comparison, Costs
from lowtide.measure import Measurement
from lowtide.plan import PlannedRegion, simulate
from lowtide.plan.reading import ENGINE, TraceIndex, run
from lowtide.records import Phase

TRACE = block_chain(6)
PLAN = (PlannedRegion(("b0",)), PlannedRegion(("b1",)))
BEFORE, AFTER = simulate(TRACE, None), simulate(TRACE, PLAN)


def compared(ops: float, engine: float, *, machine: float = 1.0, peak: float = 1.0) -> Comparison:
    """A machine that is ``machine`` times slower in all, and in replayed ops and in the engine by factors more."""
    replay_s, engine_s = AFTER.replay_s * ops, AFTER.overhead_s * engine
    step_s = (BEFORE.step_s + replay_s + engine_s) * machine
    planned = Measurement(int(AFTER.peak_bytes * peak), step_s, 0.0, replay_s * machine, 5)
    return Comparison(BEFORE, AFTER, planned, step_s / (BEFORE.step_s * machine))


def test_what_was_predicted_is_not_worth_a_word() -> None:
    found = compared(1.0, 1.0, machine=3.0)
    assert found.notes() == ()
    assert not found.time_is_off


@pytest.mark.parametrize(("ops", "engine", "term"), [(2.0, 1.0, "ops that run again"), (1.0, 20000.0, "the engine")])
def test_the_term_that_was_wrong_is_named(ops, engine, term) -> None:
    found = compared(ops, engine, machine=0.5)
    assert found.time_is_off
    assert f"most of the difference is in {term}" in found.notes()[0]


@pytest.mark.parametrize(("peak", "why"), [(1.1, "inside kernels"), (0.9, "buffers that the plain step held")])
def test_a_peak_that_was_off_has_its_likely_cause(peak, why) -> None:
    assert why in compared(1.0, 1.0, peak=peak).notes()[0]


def test_corrected_costs_predict_what_was_measured() -> None:
    found = compared(1.7, 3.0, machine=0.25)
    costs = found.costs()
    assert (costs.ops, costs.engine) == (pytest.approx(1.7), pytest.approx(3.0))
    again = run(TraceIndex(costs.applied(TRACE), ENGINE.times(costs.engine)), PLAN)
    assert again.added_s == pytest.approx(AFTER.replay_s * 1.7 + AFTER.overhead_s * 3.0)


def test_factors_beyond_belief_are_not_believed() -> None:
    assert compared(1.0, 9000.0).costs().engine == 4.0


def test_only_ops_that_may_run_again_are_corrected() -> None:
    corrected = Costs(ops=2.0).applied(TRACE)
    factors = [new.seconds / old.seconds for new, old in zip(corrected.ops, TRACE.ops, strict=True)]
    assert factors == [2.0 if op.phase is Phase.FORWARD else 1.0 for op in TRACE.ops]
