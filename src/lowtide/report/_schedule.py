"""When each module runs: forward, replays, backward and the optimizer as stretches of time, a lane each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.records import Phase, StepTrace
from lowtide.report._timeline import region_name

if TYPE_CHECKING:
    from lowtide.plan import Moment, Simulation

LANES = ("forward", "replay", "backward", "optimizer")
_MOST = 1200
_COLUMNS = 1000


@dataclass(frozen=True, slots=True)
class Stretch:
    """Ops of one phase that ran for one module without a break.

    Attributes:
        lane: one of ``LANES``.
        name: of the module, or the region that is replayed.
        start_s, end_s: within the step.
    """

    lane: str
    name: str
    start_s: float
    end_s: float


def schedule(simulation: Simulation, trace: StepTrace) -> tuple[Stretch, ...]:
    """The stretches of a step, in order of time; of a very long one, those that a screen can show."""
    stretches = _joined(_each(simulation, trace), lambda a, b: a.lane == b.lane and a.name == b.name)
    return stretches if len(stretches) <= _MOST else _coarser(stretches, simulation.step_s / _COLUMNS)


def unit_of(path: str) -> str:
    """The part of the model that a module belongs to: its path up to the first number.

    >>> unit_of("blocks.3.mlp.up"), unit_of("head"), unit_of("encoder.norm"), unit_of("")
    ('blocks.3', 'head', 'encoder', '(model)')
    """
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number + 1]) or "(model)"


def _each(simulation: Simulation, trace: StepTrace) -> Iterable[Stretch]:
    units = _units(trace)
    for moment in simulation.moments:
        yield Stretch(moment.phase, _name(moment, units), moment.start_s, moment.start_s + moment.seconds)


def _name(moment: Moment, units: list[str]) -> str:
    return region_name(moment.region) if moment.region else units[moment.op]


def _units(trace: StepTrace) -> list[str]:
    """By op. Backward ops without a module count with the module whose saved tensors were asked for last."""
    used = {tensor.used: tensor.call for tensor in trace.saved if tensor.used is not None}
    found, last = [], "outside any module"
    for i, op in enumerate(trace.ops):
        asked = used.get(i)
        if asked is not None:
            last = unit_of(trace.calls[asked].path)
        call = op.call
        outside = last if op.phase is Phase.BACKWARD else "outside any module"
        found.append(outside if call is None else unit_of(trace.calls[call].path))
    return found


def _joined(stretches: Iterable[Stretch], alike: Callable[[Stretch, Stretch], bool]) -> tuple[Stretch, ...]:
    found: list[Stretch] = []
    for stretch in stretches:
        if found and alike(found[-1], stretch):
            stretch = Stretch(stretch.lane, found[-1].name, found.pop().start_s, stretch.end_s)
        found.append(stretch)
    return tuple(found)


def _coarser(stretches: tuple[Stretch, ...], width_s: float) -> tuple[Stretch, ...]:
    """Neighbours of one lane that a screen cannot tell apart become one."""
    found: list[Stretch] = []
    for lane in LANES:
        of_lane = (s for s in stretches if s.lane == lane)
        found += _joined(of_lane, lambda a, b: b.start_s - a.end_s < width_s and a.end_s - a.start_s < 2 * width_s)
    return tuple(sorted(found, key=lambda s: s.start_s))
