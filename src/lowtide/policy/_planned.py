"""The calls that a plan keeps inside a region, as a policy."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.plan import KeptCall
from lowtide.policy._matchers import Matcher
from lowtide.policy._policy import Expected, Policy, Run
from lowtide.records import CallSite, Decision


@dataclass(frozen=True, repr=False)
class _IsCall(Matcher):
    """Matches one call, by module, function, and number of calls of the function before."""

    call: KeptCall

    def matches(self, site: CallSite) -> bool:
        return _call_of(site) == self.call

    def near(self, site: CallSite) -> tuple[str, ...]:
        return (_name_of(_call_of(site)),) if site.level == "function" and site.module == self.call.module else ()

    def __repr__(self) -> str:
        return f"call({_name_of(self.call)!r})"


@dataclass(frozen=True, repr=False)
class KeepCalls(Policy):
    """Keep the results of these calls, and recompute all else.

    Attributes:
        calls: of torch functions, inside one region.
    """

    calls: tuple[KeptCall, ...]

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """Keep what the plan names."""
        return Decision.KEEP if site.level == "function" and _call_of(site) in self.calls else None

    def expects(self) -> tuple[Expected, ...]:
        """Every call that the plan names is there."""
        return tuple(Expected(f"keep({_name_of(call)!r}) of the plan", (_IsCall(call),)) for call in self.calls)

    def __repr__(self) -> str:
        return f"KeepCalls({', '.join(map(_name_of, self.calls))})"


def _call_of(site: CallSite) -> KeptCall:
    return KeptCall(site.module, site.function_name, site.index)


def _name_of(call: KeptCall) -> str:
    return f"{call.function}[{call.index}] in {call.module}"
