"""The memory model as a mixed-integer program, on HiGHS (through ``scipy.optimize.milp``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from lowtide.plan._index import Floats
from lowtide.plan._problem import MemoryModel
from lowtide.plan.solvers._quiet import quiet

_SCALE = 1e2
"""The budget in the units of the program: far above the solver's tolerance of 1e-6, which is then less than a byte in 10 GB."""

_REL_GAP_OF_PEAK = 1e-6
"""Among very many plans whose peaks differ by a few buffers of some bytes, the last byte is not worth the search."""

_INFEASIBLE = 2
"""A status of ``scipy.optimize.milp``."""


@dataclass(frozen=True)
class Choice:
    """What a program was solved to.

    Attributes:
        chosen: candidates, by number; ``None`` when none was found.
        objective: of what was found; seconds, or bytes of the smallest peak.
        bound: nothing better than this exists; infinite when there is no solution at all.
    """

    chosen: tuple[int, ...] | None
    objective: float
    bound: float


def fastest(model: MemoryModel, budget_bytes: float, *, time_limit_s: float, rel_gap: float, better_than_s: float = np.inf) -> Choice:
    """The candidates of least replay time with no moment over budget; none unless they are better than what is known."""
    if not model.candidates:
        return Choice((), 0.0, 0.0) if model.constant.max() <= budget_bytes else Choice(None, np.inf, np.inf)
    scale = _SCALE / max(budget_bytes, 1.0)
    rows = LinearConstraint(model.rows * scale, -np.inf, (budget_bytes + 0.5 - model.constant) * scale)
    cost = np.concatenate([model.seconds, np.zeros(model.extra)])
    unit = float(cost.max(initial=0.0)) or 1.0
    limits = [rows] if np.isinf(better_than_s) else [rows, LinearConstraint(cost / unit, -np.inf, better_than_s * (1 - rel_gap) / unit)]
    return _solve(model, cost / unit, limits, unit=unit, most=np.zeros(0), time_limit_s=time_limit_s, rel_gap=rel_gap)


def lowest(model: MemoryModel, at_most_bytes: int, *, time_limit_s: float) -> Choice:
    """The candidates of the smallest peak, from what is known to be possible down.

    A last variable is at least the bytes of each moment.
    """
    if not model.candidates:
        return Choice((), float(model.constant.max()), float(model.constant.max()))
    unit = max(at_most_bytes, 1) / _SCALE
    ceiling = sparse.csr_array(np.full((len(model.constant), 1), -1.0))
    rows = LinearConstraint(sparse.hstack([model.rows / unit, ceiling]), -np.inf, -model.constant / unit)
    cost = np.concatenate([np.zeros(model.rows.shape[1]), [1.0]])
    most = np.array([(at_most_bytes + 0.5) / unit])
    return _solve(model, cost, [rows], unit=unit, most=most, time_limit_s=time_limit_s, rel_gap=_REL_GAP_OF_PEAK)


def _solve(
    model: MemoryModel, cost: Floats, rows: list[LinearConstraint], *, unit: float, most: Floats, time_limit_s: float, rel_gap: float
) -> Choice:
    """Minimise ``cost``, which is in units of ``unit``; ``most`` bounds variables beyond those of the model."""
    free = len(most)
    count = len(model.candidates)
    with quiet():
        result: Any = milp(
            cost,
            constraints=[*rows, *_structure(model, free)],
            integrality=np.concatenate([np.ones(count), np.zeros(model.extra + free)]),
            bounds=Bounds(0.0, np.concatenate([np.ones(count + model.extra), most])),
            options={"time_limit": time_limit_s, "mip_rel_gap": rel_gap},
        )
    if result.x is None:
        known = np.inf if result.status == _INFEASIBLE else result.mip_dual_bound or 0.0
        return Choice(None, np.inf, max(float(known), 0.0) * unit)
    chosen = tuple(int(i) for i in np.flatnonzero(result.x[:count] > 0.5))
    bound = result.fun if result.mip_dual_bound is None else result.mip_dual_bound  # none when nothing was left to choose
    return Choice(chosen, float(result.fun) * unit, float(bound) * unit)


def _structure(model: MemoryModel, free: int) -> list[LinearConstraint]:
    """Candidates that exclude each other, and what extra variables are at least."""
    width = model.rows.shape[1] + free
    found = []
    if model.cliques:
        at = [i for i, group in enumerate(model.cliques) for _ in group]
        to = [c for group in model.cliques for c in group]
        packing = sparse.csr_array(sparse.coo_array((np.ones(len(at)), (at, to)), shape=(len(model.cliques), width)))
        found.append(LinearConstraint(packing, -np.inf, 1.0))
    if model.extra:
        ties = sparse.csr_array(sparse.hstack([model.at_least, sparse.csr_array((len(model.floor), free))]))
        found.append(LinearConstraint(ties, model.floor, np.inf))
    return found
