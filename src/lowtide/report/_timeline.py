"""A simulated step as arrays that can be drawn: bytes by category over time, labels, replay intervals.

A step has tens of thousands of moments and a screen has a thousand columns. ``thinned`` keeps, for each
column, its highest and its lowest moment, so that no peak is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lowtide.records import Category, StepTrace

if TYPE_CHECKING:
    from lowtide.plan import Moment, Simulation

STACK_ORDER = (
    Category.PARAMETER,
    Category.OPTIMIZER,
    Category.INPUT,
    Category.GRADIENT,
    Category.ACTIVATION,
    Category.TEMPORARY,
)
"""From the bottom up: what is always there lies below what comes and goes."""


@dataclass(frozen=True)
class Interval:
    """A stretch of a step in which one region was replayed."""

    start_s: float
    end_s: float
    region: tuple[str, ...]


@dataclass(frozen=True)
class Timeline:
    """Live bytes over one step; each row holds from its start to the start of the next.

    Attributes:
        start_s: ``[n]``, rising.
        live_bytes: ``[n, len(Category)]`` in the order of ``Category``.
        moments: ``[n]``, which moment of the simulation each row is.
        end_s: when the step ends.
        replays: in order of time.
    """

    start_s: NDArray[np.float64]
    live_bytes: NDArray[np.float64]
    moments: NDArray[np.int64]
    end_s: float
    replays: tuple[Interval, ...]

    @property
    def total_bytes(self) -> NDArray[np.float64]:
        """Sum over categories, ``[n]``."""
        return np.asarray(self.live_bytes.sum(axis=1), dtype=np.float64)

    def of(self, category: Category) -> NDArray[np.float64]:
        """Bytes of one category, ``[n]``."""
        return self.live_bytes[:, list(Category).index(category)]


def timeline(simulation: Simulation) -> Timeline:
    """Lay a simulation out as arrays.

    Raises:
        ValueError: the simulation has no moments.
    """
    moments = simulation.moments
    if not moments:
        raise ValueError("a timeline needs a simulation with at least one moment; this one has none")
    return Timeline(
        start_s=np.array([moment.start_s for moment in moments], dtype=np.float64),
        live_bytes=np.array([moment.live_bytes for moment in moments], dtype=np.float64),
        moments=np.arange(len(moments)),
        end_s=max(moment.start_s + moment.seconds for moment in moments),
        replays=_replays(moments),
    )


def thinned(line: Timeline, columns: int) -> Timeline:
    """At most two rows for each of so many equal stretches of time: the highest and the lowest.

    >>> from types import SimpleNamespace as NS
    >>> heights = [1, 9, 2, 3, 4, 0, 7, 5]
    >>> moments = [NS(phase="forward", region=(), start_s=i, seconds=1, live_bytes=(h, 0, 0, 0, 0, 0)) for i, h in enumerate(heights)]
    >>> thinned(timeline(NS(moments=moments)), 2).total_bytes.tolist()
    [1.0, 9.0, 0.0, 7.0]
    """
    if len(line.start_s) <= 2 * columns:
        return line
    first = line.start_s[0]
    span = max(line.end_s - first, np.finfo(np.float64).tiny)
    column = np.minimum(((line.start_s - first) / span * columns).astype(np.int64), columns - 1)
    rows = _extremes(column, line.total_bytes)
    return Timeline(line.start_s[rows], line.live_bytes[rows], line.moments[rows], line.end_s, line.replays)


def labels(line: Timeline, simulation: Simulation, trace: StepTrace) -> list[str]:
    """What ran in each row: op, module path, source line, phase; one text a row, lines parted by newlines."""
    return [_label(simulation.moments[index], trace) for index in line.moments.tolist()]


def _extremes(column: NDArray[np.int64], total: NDArray[np.float64]) -> NDArray[np.int64]:
    by_height = np.lexsort((total, column))
    lowest = np.flatnonzero(np.diff(column[by_height], prepend=-1))
    highest = np.append(lowest[1:], len(by_height)) - 1
    return np.unique(by_height[np.concatenate((lowest, highest))])


def _replays(moments: tuple[Moment, ...]) -> tuple[Interval, ...]:
    found: list[Interval] = []
    previous: Moment | None = None
    for moment in moments:
        if moment.phase == "replay":
            goes_on = previous is not None and previous.phase == "replay" and previous.region == moment.region
            start_s = found.pop().start_s if goes_on else moment.start_s
            found.append(Interval(start_s, moment.start_s + moment.seconds, moment.region))
        previous = moment
    return tuple(found)


def _label(moment: Moment, trace: StepTrace) -> str:
    op = trace.ops[moment.op]
    path = trace.calls[op.call].path or "(the model itself)" if op.call is not None else "outside any module"
    phase = f"replay of {region_name(moment.region)}" if moment.region else moment.phase
    return "\n".join(part for part in (op.name, path, op.source, phase) if part)


def region_name(paths: tuple[str, ...]) -> str:
    """One name for a region of one or several modules.

    >>> region_name(("blocks.1",)), region_name(("blocks.1", "blocks.2", "blocks.3")), region_name(("",))
    ('blocks.1', 'blocks.1 … blocks.3', '(model)')
    """
    names = [path or "(model)" for path in paths] or ["(unknown)"]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
