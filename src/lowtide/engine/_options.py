"""What can be chosen about a region. Nothing here is needed for right gradients: the defaults are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lowtide.errors import InvalidInputError
from lowtide.records import CallSite, Decision


class Policy(Protocol):
    """Decides for each call in a region whether its results are kept or computed again."""

    def decide(self, site: CallSite, /) -> Decision: ...


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a region.

    Attributes:
        name: how errors, warnings and ``explain`` call the region; by default the module path or the function's name.
        early_stop: let a replay end as soon as it has made what backward needs. Where the tail of the region matters
            (hooks, context managers), it runs to its end all the same.
        audit_every: one call in so many is watched op by op, to notice a region that changes its ways; the first
            call always is. 0 watches the first call only.
        check_values: compare what a replay made with what the forward had, bit by bit, in every step, and raise
            ``ReplayMismatchError`` for the first op that differs. Costs one pass over every saved tensor.
        python_state: put lists, counters and attributes that the region changed back to what they were for the
            replay, so that they end as after one forward.
        policy: decides for each call of a torch function or module inside the region whether its results are kept:
            ``policy.decide(site)`` gets a ``CallSite`` and returns ``Decision.KEEP`` or ``Decision.RECOMPUTE``. It is asked
            once a call, when the region's first run is over; from the next run on what it chose is kept, and a
            replay does not run those calls again. ``None`` keeps nothing.
        first_saved: of the tensors that autograd saves in a call, how many are dropped, from the first on. Those after them are kept as
            they are, and a replay ends before it gets there; inside other regions and hooks all are dropped. ``None`` for all.

    Raises:
        InvalidInputError: the policy has no method ``decide``, ``first_saved`` is less than one, or there are both.
    """

    name: str = ""
    early_stop: bool = True
    audit_every: int = 256
    check_values: bool = False
    python_state: bool = True
    policy: Policy | None = None
    first_saved: int | None = None

    def __post_init__(self) -> None:
        if self.policy is not None and not callable(getattr(self.policy, "decide", None)):
            raise InvalidInputError(
                f"a policy needs a method decide(site) that returns a Decision, but {self.policy!r} has none: "
                "pass one of lowtide's policies, or an object with that method"
            )
        if self.first_saved is not None and (self.first_saved < 1 or self.policy is not None):
            raise InvalidInputError(
                f"first_saved is how many saved tensors a region drops: one or more, and without a policy; found {self.first_saved!r}"
            )
        object.__setattr__(self, "policy", _known(self.policy))


def _known(policy: Policy | None) -> Policy | None:
    """An equal policy that was given before: what was learned under it holds for this one."""
    try:
        known = _KNOWN.get(policy)
    except TypeError:
        return policy
    if known is None and policy is not None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[policy] = policy
    return known


_MOST_KNOWN = 256
_KNOWN: dict[Any, Policy] = {}
