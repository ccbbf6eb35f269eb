"""What can be chosen about a region. Nothing here is needed for right gradients: the defaults are right."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    name: str = ""
    early_stop: bool = True
    audit_every: int = 256
    check_values: bool = False
    python_state: bool = True
