"""The memory model as a mixed-integer program, on HiGHS (through ``scipy.optimize``).

A model of a dozen blocks has hundreds of candidates, nearly all of which no good plan has. The relaxation says which: raising a
variable from 0 costs at least its reduced cost, so a candidate whose reduced cost is more than the distance between the
relaxation and a plan that is known can be left out for good (Crowder, Johnson and Padberg 1983, "Solving large-scale
zero-one linear programming problems"). The plan comes from the candidates with the smallest reduced costs alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowtide.plan import _scipy as scipy
from lowtide.plan._index import Floats, Ints
from lowtide.plan._problem import MemoryModel
from lowtide.plan.solvers._quiet import quiet

_SCALE = 1e2
"""The budget, and the dearest candidate, in the units of the program: far above the solver's tolerances of 1e-6, which are then less than a
byte in 10 GB, and no time to speak of."""

_REL_GAP_OF_PEAK = 1e-6
"""Among very many plans whose peaks differ by a few buffers of some bytes, the last byte is not worth the search."""

_CORE = 150
"""Candidates from which a first plan is made."""
_SHARE_OF_CORE = 0.5

_INFEASIBLE = 2
"""A status of ``scipy.optimize``."""


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

    def of(self, places: Ints) -> Choice:
        """The same, where candidate i was number ``places[i]``."""
        return self if self.chosen is None else replace(self, chosen=tuple(int(places[i]) for i in self.chosen))


@dataclass(frozen=True)
class _Program:
    """Minimise ``cost @ v`` over the variables of a model, and ``free`` more.

    Attributes:
        cost: in units of ``unit``.
        rows, most: ``rows @ v <= most``.
        free: upper bounds of the variables beyond those of the model.
    """

    model: MemoryModel
    cost: Floats
    rows: scipy.sparse.csr_array
    most: Floats
    free: Floats
    unit: float

    @property
    def bounds(self) -> scipy.optimize.Bounds:
        return scipy.optimize.Bounds(0.0, np.concatenate([np.ones(len(self.model.candidates) + self.model.extra), self.free]))


def fastest(model: MemoryModel, budget_bytes: float, *, time_limit_s: float, rel_gap: float, better_than_s: float = np.inf) -> Choice:
    """The candidates of least time with no moment over budget; none unless they are better than what is known."""
    if not model.candidates:
        return Choice((), 0.0, 0.0) if model.constant.max() <= budget_bytes else Choice(None, np.inf, np.inf)
    if len(model.candidates) <= _CORE:
        return _solve(_fastest_program(model, budget_bytes, better_than_s, rel_gap), time_limit_s, rel_gap)
    deadline = time.monotonic() + time_limit_s
    relaxed = _relaxed(_fastest_program(model, budget_bytes, np.inf, rel_gap))
    if relaxed is None:
        return Choice(None, np.inf, np.inf)
    bound_s, reduced_s = relaxed
    core = np.sort(np.argsort(reduced_s, kind="stable")[:_CORE])
    best = _solve_part(model, core, budget_bytes, time_limit_s * _SHARE_OF_CORE, rel_gap, better_than_s)
    known_s = min(best.objective, better_than_s)
    left = np.flatnonzero(bound_s + reduced_s <= known_s)
    if np.isin(left, core).all():
        return best if np.isfinite(best.bound) else replace(best, bound=known_s)
    rest = _solve_part(model, left, budget_bytes, max(deadline - time.monotonic(), 0.0), rel_gap, known_s)
    return replace(best if rest.chosen is None else rest, bound=max(min(rest.bound, known_s), bound_s))


def _solve_part(model: MemoryModel, places: Ints, budget_bytes: float, time_limit_s: float, rel_gap: float, better_than_s: float) -> Choice:
    part = model.only(places)
    return _solve(_fastest_program(part, budget_bytes, better_than_s, rel_gap), time_limit_s, rel_gap).of(places)


def _fastest_program(model: MemoryModel, budget_bytes: float, better_than_s: float, rel_gap: float) -> _Program:
    scale = _SCALE / max(budget_bytes, 1.0)
    cost = np.concatenate([model.seconds, np.zeros(model.extra)])
    unit = (float(cost.max(initial=0.0)) or 1.0) / _SCALE
    rows, most = model.rows * scale, (budget_bytes + 0.5 - model.constant) * scale
    if np.isfinite(better_than_s):
        rows = scipy.sparse.csr_array(scipy.sparse.vstack([rows, scipy.sparse.csr_array(cost[None] / unit)]))
        most = np.append(most, better_than_s * (1 - rel_gap) / unit)
    return _Program(model, cost / unit, rows, most, np.zeros(0), unit)


def lowest(model: MemoryModel, at_most_bytes: int, *, time_limit_s: float) -> Choice:
    """The candidates of the smallest peak, from what is known to be possible down.

    A last variable is at least the bytes of each moment.
    """
    if not model.candidates:
        return Choice((), float(model.constant.max()), float(model.constant.max()))
    unit = max(at_most_bytes, 1) / _SCALE
    ceiling = scipy.sparse.csr_array(np.full((len(model.constant), 1), -1.0))
    rows = scipy.sparse.csr_array(scipy.sparse.hstack([model.rows / unit, ceiling]))
    cost = np.concatenate([np.zeros(model.rows.shape[1]), [1.0]])
    free = np.array([(at_most_bytes + 0.5) / unit])
    return _solve(_Program(model, cost, rows, -model.constant / unit, free, unit), time_limit_s, _REL_GAP_OF_PEAK)


def _solve(program: _Program, time_limit_s: float, rel_gap: float) -> Choice:
    model = program.model
    count, continuous = len(model.candidates), model.extra + len(program.free)
    with quiet():
        result: Any = scipy.optimize.milp(
            program.cost,
            constraints=[scipy.optimize.LinearConstraint(program.rows, -np.inf, program.most), *_structure(model, len(program.free))],
            integrality=np.concatenate([np.ones(count), np.zeros(continuous)]),
            bounds=program.bounds,
            options={"time_limit": time_limit_s, "mip_rel_gap": rel_gap},
        )
    if result.x is None:
        known = np.inf if result.status == _INFEASIBLE else result.mip_dual_bound or 0.0
        return Choice(None, np.inf, max(float(known), 0.0) * program.unit)
    chosen = tuple(int(i) for i in np.flatnonzero(result.x[:count] > 0.5))
    bound = result.fun if result.mip_dual_bound is None else result.mip_dual_bound  # none when nothing was left to choose
    return Choice(chosen, float(result.fun) * program.unit, float(bound) * program.unit)


def _relaxed(program: _Program) -> tuple[float, Floats] | None:
    """The least time where candidates may be chosen in part, and each one's reduced cost; ``None`` if nothing fits."""
    parts = [(program.rows, program.most)]
    for constraint in _structure(program.model, len(program.free)):
        above = np.isfinite(constraint.ub).all()
        parts.append((constraint.A, np.broadcast_to(constraint.ub, constraint.A.shape[0])) if above else (-constraint.A, -constraint.lb))
    matrix, most = scipy.sparse.vstack([a for a, _ in parts]), np.concatenate([b for _, b in parts])
    limits = np.stack([np.zeros(len(program.cost)), program.bounds.ub], axis=1)
    with quiet():
        result: Any = scipy.optimize.linprog(program.cost, A_ub=matrix, b_ub=most, bounds=limits, method="highs")
    if result.status == _INFEASIBLE:
        return None
    count = len(program.model.candidates)
    if result.x is None:
        return 0.0, np.zeros(count)
    return float(result.fun) * program.unit, np.maximum(result.lower.marginals[:count], 0.0) * program.unit


def _structure(model: MemoryModel, free: int) -> list[scipy.optimize.LinearConstraint]:
    """Candidates that exclude each other, and what extra variables are at least."""
    width = model.rows.shape[1] + free
    found = []
    if model.cliques:
        at = [i for i, group in enumerate(model.cliques) for _ in group]
        to = [c for group in model.cliques for c in group]
        packing = scipy.sparse.csr_array(scipy.sparse.coo_array((np.ones(len(at)), (at, to)), shape=(len(model.cliques), width)))
        found.append(scipy.optimize.LinearConstraint(packing, -np.inf, 1.0))
    if model.extra:
        ties = scipy.sparse.csr_array(scipy.sparse.hstack([model.at_least, scipy.sparse.csr_array((len(model.floor), free))]))
        found.append(scipy.optimize.LinearConstraint(ties, model.floor, np.inf))
    return found
