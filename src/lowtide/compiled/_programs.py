"""Choosing one of several options each, as small integer programs on HiGHS (through ``scipy.optimize``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

Floats = NDArray[np.float64]

_TIME_LIMIT_S = 1.0
_GAP = 5e-3


def fastest(seconds: Floats, take: Floats, taken: Floats, adds: Floats, level: Floats, budget: float | None) -> list[int] | None:
    """Options of least time with no moment over a budget; without a budget, those whose highest moment is the lowest.

    Args:
        seconds: of each option.
        take, taken: ``take @ chosen == taken``, which says what has to be chosen.
        adds: bytes that each option adds at each moment, ``[moments, options]``.
        level: bytes that are alive at each moment anyway.
        budget: bytes.

    Returns:
        By number; ``None`` where there are none.
    """
    count = len(seconds)
    scale = max(float(np.abs(level).max(initial=0)), float(np.abs(adds).max(initial=0)), 1.0)
    cost = np.append(seconds / max(float(np.abs(seconds).max(initial=0)), 1e-12), 0.0)
    most = np.inf
    if budget is None:
        cost = np.append(1e-6 * cost[:-1], 1.0)
    else:
        most = budget / scale
    found = optimize.milp(
        cost,
        constraints=[
            optimize.LinearConstraint(np.hstack([take, np.zeros((len(take), 1))]), taken, taken),
            optimize.LinearConstraint(np.hstack([adds / scale, np.full((len(adds), 1), -1.0)]), -np.inf, -level / scale),
        ],
        bounds=optimize.Bounds(np.append(np.zeros(count), -np.inf), np.append(np.ones(count), most)),
        integrality=np.append(np.ones(count), 0),
        options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": _GAP},
    )
    return None if found.x is None else [int(k) for k in np.flatnonzero(found.x[:-1] > 0.5)]
