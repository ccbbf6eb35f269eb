"""Where a measured step differs from the simulated one, which term was wrong, and costs that are right for this machine.

The added time of a plan has two terms: ops that run again, and the engine. The engine times its replays, so each can be compared
with what was predicted for it. Ops cost more than in the trace where another program took part of the machine, or a cache was warm;
a peak is higher where the allocator rounds, or a kernel takes memory that it does not report.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.measure import Measurement
from lowtide.plan import Simulation
from lowtide.records import Phase, StepTrace
from lowtide.units import format_bytes, format_seconds

_OFF = 0.03
_LIKELY = (0.25, 4.0)
"""Beyond these factors a measurement is noise: of a few microseconds, or of a machine that does something else."""


@dataclass(frozen=True)
class Costs:
    """By how much this machine is slower than the figures that a plan was made with.

    Attributes:
        ops: for ops that run again.
        engine: for the engine.
    """

    ops: float = 1.0
    engine: float = 1.0

    def applied(self, trace: StepTrace) -> StepTrace:
        """The trace with these times for the ops of forward."""
        ops = tuple(replace(op, seconds=op.seconds * self.ops) if op.phase is Phase.FORWARD else op for op in trace.ops)
        return replace(trace, ops=ops)


@dataclass(frozen=True)
class Comparison:
    """A plan as measured against the plan as simulated.

    Attributes:
        before, after: simulated without and with the plan.
        planned: measured.
        ratio: measured time with the plan over time without.
    """

    before: Simulation
    after: Simulation
    planned: Measurement
    ratio: float

    @property
    def _predicted(self) -> float:
        return self.after.planned_s / self.before.step_s

    @property
    def time_is_off(self) -> bool:
        """By more than 3 %."""
        return abs(self.ratio / self._predicted - 1) > _OFF

    @property
    def _measured_s(self) -> tuple[float, float]:
        """Added time in replays and in the rest of the engine, in the seconds of the trace."""
        scale = self.before.step_s * self.ratio / self.planned.step_s
        replay_s = self.planned.replay_s * scale
        return replay_s, max((self.ratio - 1) * self.before.step_s - replay_s, 0.0)

    def costs(self) -> Costs:
        """What would have predicted the measured time."""
        replay_s, engine_s = self._measured_s
        return Costs(_factor(replay_s, self.after.replay_s), _factor(engine_s, self.after.overhead_s))

    def notes(self) -> tuple[str, ...]:
        """In words, what was off by more than 3 %; empty if nothing was."""
        return (*self._note_of_time(), *self._note_of_peak())

    def _note_of_time(self) -> tuple[str, ...]:
        if not self.time_is_off:
            return ()
        replay_s, engine_s = self._measured_s
        terms = ("ops that run again", replay_s, self.after.replay_s), ("the engine", engine_s, self.after.overhead_s)
        name, measured, predicted = max(terms, key=lambda term: abs(term[1] - term[2]))
        whole = f"the step took {self.ratio:.3f} times the plain one, {self._predicted:.3f} were predicted"
        return (f"{whole}: most of the difference is in {name}, {format_seconds(measured)} for {format_seconds(predicted)}",)

    def _note_of_peak(self) -> tuple[str, ...]:
        measured, predicted = self.planned.peak_bytes, self.after.peak_bytes
        if abs(measured - predicted) <= _OFF * measured:
            return ()
        more = measured > predicted
        why = (
            "memory inside kernels that the trace does not see, or rounding by the allocator"
            if more
            else "buffers that the plain step held"
        )
        return (f"the peak was {format_bytes(measured)}, {format_bytes(predicted)} were predicted: {why}",)


def _factor(measured: float, predicted: float) -> float:
    if predicted <= 0:
        return 1.0
    return min(max(measured / predicted, _LIKELY[0]), _LIKELY[1])
