"""What the engine itself takes for a region, beside the ops that run again.

Without it, a plan of many tiny regions looks better than it is. The figures are rough ones of one core of a common server, in
the order of what ``benchmarks/engine_overhead.py`` prints there; ``fit`` corrects them for the machine that it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.plan._replay import Replay


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that the engine takes, in forward and backward together.

    Attributes:
        region_s: for each call of a region.
        slot_s: for each saved tensor that it drops.
        function_s: for each call of a function in a region that keeps some.
        kept_s: for each call whose results it keeps.
    """

    region_s: float = 60e-6
    slot_s: float = 10e-6
    function_s: float = 1.5e-6
    kept_s: float = 40e-6

    def of(self, replay: Replay) -> float:
        """Of one call of a region and its replay."""
        functions = sum(len(replay.index.functions_in(call)) for call in replay.calls) if replay.kept else 0
        return self.region_s + self.slot_s * len(replay.dropped) + self.function_s * functions + self.kept_s * len(replay.kept)

    def times(self, factor: float) -> Overhead:
        """The same on a machine that is so much slower."""
        return Overhead(*(factor * s for s in (self.region_s, self.slot_s, self.function_s, self.kept_s)))


ENGINE = Overhead()
"""Of the engine as it is."""
