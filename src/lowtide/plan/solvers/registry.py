"""Every solver by name, with where it comes from and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lowtide.errors import InvalidInputError
from lowtide.plan._index import TraceIndex
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers import all_blocks, binomial, chain_optimal, constrained_path, every_n, exact, first_k, mixed_integer, none, sqrt_n
from lowtide.plan.solvers.exact import Exact

AUTO = "auto"
Rule = Callable[[TraceIndex], list[list[PlannedRegion]]]


@dataclass(frozen=True)
class Solver:
    """One way to plan.

    Attributes:
        name: as ``solver=`` and ``--solver`` take it.
        source: who published it, or whose practice it is.
        complexity: for n blocks or layers.
        rule: the plans that it has for a step, whatever the budget; the fastest that fits is its answer.
        exact: a search that proves what it finds, for solvers that are no rule; given as well until when to look for candidates.
        nests: its plans have regions inside regions. Of many blocks it is asked by name alone, for it takes long.
    """

    name: str
    source: str
    complexity: str
    rule: Rule | None = None
    exact: Callable[[TraceIndex, float], Exact] | None = None
    nests: bool = False


_ALL = (
    Solver(none.NAME, "the step as it is", "one simulation", none.regions),
    Solver(all_blocks.NAME, "common practice: checkpointing switched on", "one simulation a family of blocks", all_blocks.regions),
    Solver(every_n.NAME, "common practice", "O(n) simulations, 30 at most", every_n.regions),
    Solver(first_k.NAME, "common practice: k found by trying", "O(n) simulations, 30 at most", first_k.regions),
    Solver(sqrt_n.NAME, "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost", "O(sqrt n) simulations", sqrt_n.regions),
    Solver(
        binomial.NAME,
        "Griewank and Walther 2000, Algorithm 799: revolve (offline)",
        "O(n) schedules of O(n**2), 30 at most, a simulation each",
        binomial.regions,
        nests=True,
    ),
    Solver(
        chain_optimal.NAME,
        "Beaumont et al. 2019, Optimal checkpointing for heterogeneous chains (persistent schedules)",
        "O(n**3) times units of memory, hundreds of simulations at most; more than 100 blocks in groups of neighbours",
        chain_optimal.regions,
        nests=True,
    ),
    Solver(
        exact.WHOLE_REGION,
        "a knapsack over modules and segments, as in torch's AutoSAC (module ILP, 2024), by the search of constrained-path",
        "exponential at worst; seconds for hundreds of layers",
        exact=exact.whole_regions,
    ),
    Solver(
        mixed_integer.NAME,
        "Jain et al. 2020, Checkmate; stated over regions and kept calls, solved by HiGHS",
        "exponential; minutes for a dozen equal blocks",
        exact=exact.general,
    ),
    Solver(
        constrained_path.NAME,
        "Irnich and Desaulniers 2005, Shortest path problems with resource constraints; bounds of Beasley and Christofides 1989",
        "exponential at worst; grows with the layers on chains of blocks",
        exact=exact.flat,
    ),
    Solver(
        exact.NESTED,
        "the same, over regions with regions inside as well: persistent schedules as of Beaumont et al. 2019, of parts of blocks",
        "as constrained-path, with half as many regions again",
        exact=exact.suited,
    ),
)
SOLVERS = {solver.name: solver for solver in _ALL}


def solver_named(name: str) -> Solver:
    """The solver of a name.

    Raises:
        InvalidInputError: there is none.
    """
    if name not in SOLVERS:
        raise InvalidInputError(f"there is no solver {name!r}: choose from {AUTO}, {', '.join(SOLVERS)}")
    return SOLVERS[name]


def check_solver(name: str) -> None:
    """Refuse a name that no solver has, before anything is run.

    Raises:
        InvalidInputError: there is none.
    """
    if name != AUTO:
        solver_named(name)
