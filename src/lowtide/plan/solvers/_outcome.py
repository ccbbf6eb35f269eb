"""What an exact solver found, and what it proved."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.plan._simulate import Simulation
from lowtide.plan._solution import PlannedRegion


@dataclass(frozen=True)
class Outcome:
    """What was found, and what was proved.

    Attributes:
        regions, simulation: of the best plan; ``None`` when none was found.
        bound: no choice of regions is better: seconds of replay, or bytes of the smallest peak; infinite when it
            was proved that none fits.
    """

    regions: tuple[PlannedRegion, ...] | None
    simulation: Simulation | None
    bound: float
