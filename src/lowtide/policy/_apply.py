"""Install a policy or what a plan decided, in place, and take it out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import nn

from lowtide.engine import FunctionMember, Options, RegionHandle, install, refuse_installed
from lowtide.errors import PlanError, PolicyError
from lowtide.plan import FunctionPath, Plan, PlannedRegion
from lowtide.policy._checkpoint import read_policy
from lowtide.policy._fingerprint import fingerprint
from lowtide.policy._functions import close
from lowtide.policy._key_value_cache import CacheOff, switch_caches_off
from lowtide.policy._ledger import Decider, Ledger
from lowtide.policy._matchers import AllOf, Matcher
from lowtide.policy._module_matchers import InModule
from lowtide.policy._order import refuse_wrapped, warn_of_checkpointing
from lowtide.policy._planned import KeepCalls
from lowtide.policy._policy import Policy, PolicyRegion
from lowtide.records import CallSite, Decision

Members = list[tuple[str, nn.Module | FunctionMember]]


class _Wanted(NamedTuple):
    """A region that is to be installed; ``first_saved`` as of a plan."""

    members: Members
    policy: Policy | None
    first_saved: int | None = None


class Handle:
    """The regions that ``apply`` installed on a model.

    Attributes:
        applied: what was applied.
    """

    def __init__(self, applied: Plan | Policy, regions: list[RegionHandle], caches: list[CacheOff]) -> None:
        """Own the handles of every region, and of what keeps key-value caches away."""
        self.applied = applied
        self._regions = regions
        self._caches = caches

    @property
    def plan(self) -> Plan:
        """The plan that was applied.

        Raises:
            PlanError: it was a policy.
        """
        if not isinstance(self.applied, Plan):
            raise PlanError(f"no plan was applied to this model, but the policy {self.applied!r}: read handle.applied")
        return self.applied

    @property
    def regions(self) -> tuple[str, ...]:
        """Path of each region's module, or first and last path of a segment."""
        return tuple(region.name for region in self._regions)

    def remove(self) -> None:
        """Take the regions out: the model runs as before ``apply``. Doing it again does nothing."""
        while self._regions:
            self._regions.pop().remove()
        while self._caches:
            self._caches.pop().remove()

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the installed regions do nothing."""
        with ExitStack() as stack:
            for region in self._regions:
                stack.enter_context(region.disabled())
            for cache in self._caches:
                stack.enter_context(cache.disabled())
            yield

    def replay_seconds(self) -> float:
        """Seconds spent in replays of these regions since they were installed."""
        return sum(region.replay_seconds() for region in self._regions)


def apply(model: nn.Module, policy: Policy | Plan | str | Callable[[CallSite], Decision]) -> Handle:
    """Install a policy or a plan on a model, in place.

    No module is wrapped: names, types and ``state_dict`` stay as they are, and a module that is used several times is one region.
    A plan is checked against the model first; when anything is wrong nothing is installed. Where layers of a transformers model are
    replayed, it makes no key-value cache while gradients are recorded (with one warning), unless it is given one with something in it.

    Args:
        model: any model; for a plan, the one that it was made for, or one of the same structure.
        policy: a policy; its name, as on the command line (``"full"``, ``"every:2"``, ``"selective"``, …); a function of a ``CallSite``;
            or a plan from ``fit``, a solver or ``Plan.load``.

    Returns:
        A handle; ``handle.remove()`` puts everything back.

    Raises:
        PlanError: the plan was made for a model of another structure, or decides what cannot be carried out yet.
        PolicyError: the policy chooses modules that the model does not have; in the first step, one of its rules matched nothing, or said
            something that is no decision. It is taken out again then.
        InvalidInputError: it is no policy, or one that is made from a trace first.
        AlreadyAppliedError: a region is installed on a module of the model already.
    """
    found = policy if isinstance(policy, Plan) else read_policy(policy)
    refuse_installed(model.named_modules())
    refuse_wrapped(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    wanted = _of_plan(model, found, modules) if isinstance(found, Plan) else _of_policy(model, found, modules)
    warn_of_checkpointing((path, member) for region in wanted for path, member in region.members if isinstance(member, nn.Module))
    ledger = Ledger((region.policy for region in wanted if region.policy is not None), [_name_of(region.members) for region in wanted])
    regions = _installed(wanted, ledger)
    handle = Handle(found, regions, switch_caches_off(model, (module for region in regions for module in region.modules())))
    ledger.undo = handle.remove
    return handle


def _installed(wanted: list[_Wanted], ledger: Ledger) -> list[RegionHandle]:
    installed: list[RegionHandle] = []
    try:
        for region in wanted:
            policy = None if region.policy is None else Decider(region.policy, ledger)
            options = Options(policy=policy, first_saved=region.first_saved)
            installed.append(install(region.members, options, around=True))
    except BaseException:
        for handle in installed:
            handle.remove()
        raise
    for handle in installed:
        ledger.watch(handle.region)
    return installed


def _name_of(members: Members) -> str:
    return members[0][0] if len(members) == 1 else f"{members[0][0]} … {members[-1][0]}"


def _of_plan(model: nn.Module, plan: Plan, modules: dict[str, nn.Module]) -> list[_Wanted]:
    plan.check_fingerprint(fingerprint(model))
    regions = (part for region in plan.regions if region.decision is not Decision.KEEP for part in _from_inside(region))
    return [_Wanted(_members(r, modules), KeepCalls(r.kept) if r.kept else None, r.first_saved) for r in regions]


def _from_inside(region: PlannedRegion) -> Iterator[PlannedRegion]:
    """Regions inside come first: on a module that both have, the one around is installed over the other."""
    for inner in region.inside:
        yield from _from_inside(inner)
    yield region


def _members(region: PlannedRegion, modules: dict[str, nn.Module]) -> Members:
    if region.decision is not Decision.RECOMPUTE:
        raise PlanError(f"cannot carry out {region.decision.value!r} for {region.paths}: a plan may say 'keep' or 'recompute'")
    return [(path, _member(path, modules)) for path in region.paths]


def _member(path: str, modules: dict[str, nn.Module]) -> nn.Module | FunctionMember:
    """A module, or a call of a function that one makes."""
    if path in modules:
        return modules[path]
    function = FunctionPath.read(path)
    if function is None or function.caller not in modules:
        raise PlanError(f"the plan names the module {path if function is None else function.caller!r}, which this model does not have")
    return FunctionMember(modules[function.caller], function.function, function.index)


def _of_policy(model: nn.Module, policy: Policy, modules: dict[str, nn.Module]) -> list[_Wanted]:
    regions = policy.regions(model)
    if not regions and policy.chosen(model) is None:
        raise PolicyError(
            f"{policy!r} is over a model's blocks, but nothing repeats in {type(model).__name__}: "
            "say which modules to replay with by_layer_type"
        )
    for region in regions:
        _check_modules(model, region)
    seen: set[int] = set()
    wanted: list[_Wanted] = []
    for region in regions:
        members: Members = [(path, modules[path]) for path in region.paths if id(modules[path]) not in seen]
        seen.update(id(module) for _, module in members)
        if members:
            wanted.append(_Wanted(members, region.policy))
    return wanted


def _check_modules(model: nn.Module, region: PolicyRegion) -> None:
    """Refuse rules about modules that the model does not have, before anything is run."""
    for expected in region.policy.expects():
        missing = [_missing_in(model, matcher) for matcher in expected.matchers]
        if all(missing):
            hint = next(_hint(matcher, model) for matcher in missing if matcher is not None)
            raise PolicyError(f"the rule {expected.rule} is about modules that the model does not have{hint}")


def _missing_in(model: nn.Module, matcher: Matcher) -> InModule | None:
    """What a matcher says of modules that keeps it from ever matching in this model."""
    parts = matcher.matchers if isinstance(matcher, AllOf) else (matcher,)
    found = [part if isinstance(part, InModule) else _missing_in(model, part) for part in parts if isinstance(part, (InModule, AllOf))]
    return next((part for part in found if part is not None and not part.is_in(model)), None)


def _hint(matcher: InModule, model: nn.Module) -> str:
    if isinstance(matcher.target, str):
        known = [path for path, _ in model.named_modules() if path]
        return close(matcher.target.lstrip("*."), [*known, *dict.fromkeys(path.rpartition(".")[2] for path in known)])
    return close(matcher.target.__name__, sorted({type(module).__name__ for module in model.modules()}))
