"""Install what a plan decided, in place, and take it out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from lowtide.engine import RegionHandle, install
from lowtide.errors import PlanError
from lowtide.plan import Plan, PlannedRegion
from lowtide.policy._fingerprint import fingerprint
from lowtide.records import Decision


class Handle:
    """The regions that ``apply`` installed on a model.

    Attributes:
        plan: what was applied.
    """

    def __init__(self, plan: Plan, regions: list[RegionHandle]) -> None:
        """Own the handles of every region."""
        self.plan = plan
        self._regions = regions

    def remove(self) -> None:
        """Take the regions out: the model runs as before ``apply``. Doing it again does nothing."""
        while self._regions:
            self._regions.pop().remove()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the installed regions do nothing."""
        with ExitStack() as stack:
            for region in self._regions:
                stack.enter_context(region.disabled())
            yield

    def replay_seconds(self) -> float:
        """Seconds spent in replays of these regions since they were installed."""
        return sum(region.replay_seconds() for region in self._regions)


def apply(model: nn.Module, plan: Plan) -> Handle:
    """Install a plan on a model, in place.

    No module is wrapped: names, types and ``state_dict`` stay as they are. The plan is checked against the
    model first; when anything is wrong nothing is installed.

    Args:
        model: the model that the plan was made for, or one of the same structure.
        plan: from ``fit``, a solver, or ``Plan.load``.

    Returns:
        A handle; ``handle.remove()`` puts everything back.

    Raises:
        PlanError: the plan was made for a model of another structure, or decides what cannot be carried out yet.
        AlreadyAppliedError: a region is installed on one of these modules already.
    """
    plan.check_fingerprint(fingerprint(model))
    modules = dict(model.named_modules())
    wanted = [_members(region, modules) for region in plan.regions if region.decision is not Decision.KEEP]
    installed: list[RegionHandle] = []
    try:
        installed.extend(install(members) for members in wanted)
    except BaseException:
        for handle in installed:
            handle.remove()
        raise
    return Handle(plan, installed)


def _members(region: PlannedRegion, modules: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    if region.decision is not Decision.RECOMPUTE:
        raise PlanError(f"cannot carry out {region.decision.value!r} for {region.paths}: a plan may say 'keep' or 'recompute'")
    missing = [path for path in region.paths if path not in modules]
    if missing:
        raise PlanError(f"the plan names the module {missing[0]!r}, which this model does not have")
    return [(path, modules[path]) for path in region.paths]
