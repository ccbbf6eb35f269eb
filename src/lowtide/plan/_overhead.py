"""What the engine itself takes for a region, beside the ops that run again.

Without it, a plan of many tiny regions looks better than it is. The figures are rough ones of one core of a common server, in the midst of
a step of a transformer: the kernels in between leave little of the engine in the processor's caches, so that a call takes several times
what it does in ``benchmarks/engine_overhead.py``. ``fit`` corrects them for the machine that it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.plan._replay import Replay


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that the engine takes, in forward and backward together.

    Attributes:
        region_s: for each call of a region.
        op_s: for each op that runs again: the user's Python code around it, and what PyTorch does before the kernel runs.
        member_s: for each further module, where a region is a run of several.
        long_member_s: the same where calls of functions are among them: of those the engine takes down all there is each time.
        slot_s: for each saved tensor that it drops.
        function_s: for each call of a function in a region that keeps some.
        kept_s: for each call whose results it keeps.
    """

    region_s: float = 150e-6
    op_s: float = 10e-6
    member_s: float = 50e-6
    long_member_s: float = 250e-6
    slot_s: float = 30e-6
    function_s: float = 10e-6
    kept_s: float = 300e-6

    def of(self, replay: Replay) -> float:
        """Of one call of a region and its replay."""
        functions = sum(len(replay.index.functions_in(call)) for call in replay.calls) if replay.kept else 0
        member_s = self.long_member_s if replay.index.is_function[[*replay.calls]].any() else self.member_s
        each = self.region_s + member_s * (len(replay.calls) - 1) + self.op_s * len(replay.ops) + self.slot_s * len(replay.dropped)
        return each + self.function_s * functions + self.kept_s * len(replay.kept)

    def times(self, factor: float) -> Overhead:
        """The same on a machine that is so much slower."""
        return Overhead(**{field.name: factor * getattr(self, field.name) for field in fields(self)})


ENGINE = Overhead()
"""Of the engine as it is."""
