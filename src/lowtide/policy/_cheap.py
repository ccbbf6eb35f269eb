"""The preset that needs a trace: it recomputes only what costs next to nothing."""

from __future__ import annotations

from lowtide.errors import InvalidInputError
from lowtide.plan import Plan, solve
from lowtide.records import StepTrace


def cheap(trace: StepTrace, share: float = 0.02, *, time_limit_s: float = 30.0) -> Plan:
    """Recompute only what costs under 2 % of the step, all of it together: the least memory to be had for that.

    To keep every result that is dear to compute,
    as policies by op do, would hold more than the plain step does: much of it backward never reads.

    Args:
        trace: of a step of the model.
        share: of the step's time, between 0 and 1.
        time_limit_s: how long the solver may take in all.

    Returns:
        A plan, for ``lowtide.apply``; one without regions if nothing is as cheap.

    Raises:
        InvalidInputError: the share is out of range.
    """
    if not 0 < share < 1:
        raise InvalidInputError(f"a share of the step lies between 0 and 1; found {share}")
    return solve(trace, max_slowdown=share, time_limit_s=time_limit_s)
