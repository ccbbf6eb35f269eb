"""The options ``--plan`` and ``--policy``: what is to be replayed."""

from __future__ import annotations

from pathlib import Path

from lowtide.errors import InvalidInputError
from lowtide.plan import Plan

PLAN = "Replay what this file says, which `lowtide fit --plan` wrote."
TIMEOUT = "Under torchrun, seconds that a collective of the step may wait for the other processes."
POLICY = "Replay by a policy: full, every:2, selective, plan:50%, …; `lowtide policies` lists them."


def read_plan(plan: Path | None, policy: str | None) -> Plan | None:
    """The plan in a file; ``None`` where none was named.

    Raises:
        InvalidInputError: a policy was named as well.
        PlanError: the file cannot be read.
    """
    if plan is not None and policy is not None:
        raise InvalidInputError("--plan and --policy were both given: pass one of them")
    return None if plan is None else Plan.load(plan)
