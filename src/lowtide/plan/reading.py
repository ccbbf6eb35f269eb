"""How a trace is read for planning: for packages that ask of a trace what a plan would do to it, again and again.

``TraceIndex`` is a trace as arrays; ``replays_of`` says what replaying a region drops, holds and runs; ``run`` is ``simulate`` over an
index that is there already; ``keepable`` are the calls that a region can keep; ``ENGINE`` is what the engine takes; ``undominated`` picks
what is worth having by two costs; ``with_function_calls`` shows calls of functions between modules among the calls of a
step, ``without_function_calls`` leaves them out of regions.
"""

from __future__ import annotations

from lowtide.plan._frontier import undominated
from lowtide.plan._functions import with_function_calls, without_function_calls
from lowtide.plan._index import NEVER, TraceIndex
from lowtide.plan._keepable import keepable_calls
from lowtide.plan._overhead import ENGINE
from lowtide.plan._replay import Replay, replays_of
from lowtide.plan._simulate import run
from lowtide.plan._solution import KeptCall

__all__ = [
    "ENGINE",
    "NEVER",
    "Replay",
    "TraceIndex",
    "keepable",
    "replays_of",
    "run",
    "undominated",
    "with_function_calls",
    "without_function_calls",
]


def keepable(index: TraceIndex, paths: tuple[str, ...]) -> list[KeptCall]:
    """The calls whose results a region can keep: those that are there in each of its occurrences."""
    each = [{k.call for k in keepable_calls(index, replay.calls)} for replay in replays_of(index, paths)]
    return sorted(set.intersection(*each)) if each else []
