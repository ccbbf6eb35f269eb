"""What can be typed as a policy of ``lowtide bench``, and the plan that it stands for."""

from __future__ import annotations

import re

from lowtide.errors import InvalidInputError
from lowtide.plan import Plan, PlannedRegion, simulate, solve
from lowtide.plan._index import TraceIndex
from lowtide.plan.solvers import all_blocks, sqrt_n
from lowtide.records import StepTrace
from lowtide.units import parse_budget

NONE = "none"
_FORMS = "none, full, every:N, sqrt, or plan:BUDGET such as plan:50% or plan:1.5GiB"
_KNOWN = re.compile(r"none|full|sqrt|every:[1-9]\d*|plan:.+")


def read_policies(text: str) -> tuple[str, ...]:
    """The policies in a list parted by commas, each once.

    Raises:
        InvalidInputError: one of them is unknown.
        BudgetError: the budget of a plan cannot be read.
    """
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for policy in found:
        if not _KNOWN.fullmatch(policy):
            raise InvalidInputError(f"there is no policy {policy!r}: write {_FORMS}")
        if policy.startswith("plan:") and parse_budget(policy.removeprefix("plan:")).is_auto:
            raise InvalidInputError(f"the policy {policy!r} has no budget of its own: write bytes or a share, such as plan:50%")
    if not found:
        raise InvalidInputError(f"--policies names none: write {_FORMS}, parted by commas")
    return found


def plan_for(policy: str, trace: StepTrace, *, time_limit_s: float = 30.0) -> Plan:
    """The plan that a policy stands for, for this step.

    Raises:
        InvalidInputError: the model has no blocks for a rule over blocks.
        InfeasibleBudgetError: no plan fits the budget.
    """
    if policy.startswith("plan:"):
        return solve(trace, _bytes(policy.removeprefix("plan:"), trace), time_limit_s=time_limit_s)
    regions = () if policy == NONE else _by_rule(policy, trace)
    after = simulate(trace, regions)
    return Plan(regions, trace.fingerprint, after.peak_bytes, after.peak_bytes, after.step_s, after.replay_s, policy, device=trace.device)


def _bytes(text: str, trace: StepTrace) -> int:
    budget, before = parse_budget(text), simulate(trace, None)
    if budget.bytes is not None:
        return budget.bytes
    if budget.share is not None:
        return int(budget.share * before.peak_bytes)
    from lowtide.explain import peak
    from lowtide.records import Category

    return before.peak_bytes - int((1 - (budget.activation_share or 0)) * peak(trace).of(Category.ACTIVATION))


def _by_rule(policy: str, trace: StepTrace) -> tuple[PlannedRegion, ...]:
    index = TraceIndex(trace)
    blocks = min(all_blocks.regions(index), key=lambda plan: simulate(trace, plan).peak_bytes, default=[])
    if not blocks:
        raise InvalidInputError(f"the policy {policy!r} is over a model's blocks, but no two modules of one class save tensors here")
    if policy == "sqrt":
        plans = [tuple(plan) for plan in sqrt_n.regions(index)] or [tuple(blocks)]
        return min(plans, key=lambda plan: simulate(trace, plan).peak_bytes)
    stride = 1 if policy == "full" else int(policy.removeprefix("every:"))
    return tuple(blocks[::stride])
