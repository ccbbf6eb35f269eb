"""Why a plan decides as it does: what each region frees and costs, and what the next byte of budget would buy there.

Every figure is the difference of two simulations: the plan as it is, and the plan with one region otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lowtide.plan import KeptCall, Plan, PlannedRegion, Simulation, simulate
from lowtide.plan.reading import TraceIndex, keepable, run
from lowtide.records import Decision, StepTrace


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A change of one region that makes the step faster and takes memory.

    Attributes:
        region: paths of its modules.
        keep: the call whose results would be kept as well; ``None`` when the region would not be replayed at all.
        bytes: by which the peak rises.
        seconds: that it saves.
    """

    region: tuple[str, ...]
    keep: KeptCall | None
    bytes: int
    seconds: float

    @property
    def seconds_per_mib(self) -> float:
        """What a byte buys; infinite where it takes none."""
        return self.seconds * 2**20 / self.bytes if self.bytes else float("inf")


@dataclass(frozen=True, slots=True)
class RegionChoice:
    """One region of a plan.

    Attributes:
        paths: of its modules.
        kept: calls in it whose results are kept.
        frees_bytes: by which the peak would rise without it.
        seconds: that its replay takes, the engine's time included.
        kept_saves_s: by how much longer it would take if it kept nothing.
        next: what the next bytes would buy here; ``None`` where nothing is to be had.
        inside: how many regions are inside it, at all levels.
        first_saved: how many of its saved tensors it drops, where it keeps the others; ``None`` where it drops all.
    """

    paths: tuple[str, ...]
    kept: tuple[KeptCall, ...]
    frees_bytes: int
    seconds: float
    kept_saves_s: float
    next: Upgrade | None
    inside: int = 0
    first_saved: int | None = None

    @property
    def why(self) -> str:
        """In words."""
        if self.inside:
            return f"its replay makes the inputs of {self.inside} regions inside, each of which is replayed in turn"
        if not self.frees_bytes:
            return "frees nothing at the peak by itself: others rise to it without this one"
        if self.first_saved is not None:
            return f"the first {self.first_saved} of its saved tensors are cheap for what they free, the others are kept"
        return "keeps what is dear, replays the rest" if self.kept else "all of it is cheap for what it frees"


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """A plan, region by region.

    Attributes:
        regions: in the plan's order.
        peak_bytes, plain_peak_bytes: as simulated with and without the plan.
        step_s, plain_step_s: likewise.
        next: of all regions' upgrades, the one that saves most for a byte.
    """

    regions: tuple[RegionChoice, ...]
    peak_bytes: int
    plain_peak_bytes: int
    step_s: float
    plain_step_s: float
    next: Upgrade | None


def explain_plan(trace: StepTrace, plan: Plan) -> PlanExplanation:
    """Say for each region what is kept, why, and what the next byte would buy.

    Args:
        trace: of a step of the model that the plan is for.
        plan: any plan for it.

    Raises:
        PlanError: the plan is for another model, or decides what cannot be simulated.
    """
    before, after = simulate(trace, None), simulate(trace, plan)
    index = TraceIndex(trace)
    chosen = tuple(_choice(index, plan, region, after) for region in plan.regions if region.decision is Decision.RECOMPUTE)
    return PlanExplanation(
        chosen, after.peak_bytes, before.peak_bytes, after.planned_s, before.step_s, _best([c.next for c in chosen if c.next is not None])
    )


def _choice(index: TraceIndex, plan: Plan, region: PlannedRegion, after: Simulation) -> RegionChoice:
    others = tuple(r for r in plan.regions if r != region)
    without = run(index, others)
    bare = run(index, (*others, replace(region, kept=()))) if region.kept else after
    upgrades = [_upgrade(region, None, without, after)]
    upgrades += [_upgrade(region, call, run(index, (*others, more)), after) for call, more in _keeping_more(index, region)]
    return RegionChoice(
        paths=region.paths,
        kept=region.kept,
        frees_bytes=max(without.peak_bytes - after.peak_bytes, 0),
        seconds=after.added_s - without.added_s,
        kept_saves_s=bare.added_s - after.added_s,
        next=_best(upgrades),
        inside=_inside(region),
        first_saved=region.first_saved,
    )


def _inside(region: PlannedRegion) -> int:
    return sum(1 + _inside(inner) for inner in region.inside)


def _keeping_more(index: TraceIndex, region: PlannedRegion) -> Iterator[tuple[KeptCall, PlannedRegion]]:
    if region.inside or region.first_saved is not None:
        return  # a region with kept calls has neither
    for call in keepable(index, region.paths):
        if call not in region.kept:
            yield call, replace(region, kept=tuple(sorted((*region.kept, call))))


def _upgrade(region: PlannedRegion, keep: KeptCall | None, faster: Simulation, after: Simulation) -> Upgrade:
    return Upgrade(region.paths, keep, max(faster.peak_bytes - after.peak_bytes, 0), after.added_s - faster.added_s)


def _best(upgrades: list[Upgrade]) -> Upgrade | None:
    return max((u for u in upgrades if u.seconds > 0), key=lambda u: (u.seconds_per_mib, -u.bytes), default=None)
