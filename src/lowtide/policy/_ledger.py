"""What the first step has shown of what a policy expects, and the objects through which the engine asks a policy.

A rule that matches nothing would be a setting that silently does nothing. Sites are known once a region has run; the first
step is over for all regions when backward begins (the first replay), or where backward replays nothing, when a region is
called again. As long as some regions have not run, a rule may still be about them: that is told once a whole step has been seen
(a module may run many times before the next does, and a step may be broken off), and not yet an error.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from lowtide.errors import PolicyError
from lowtide.policy._functions import close
from lowtide.policy._matchers import Matcher
from lowtide.policy._planned import KeepCalls
from lowtide.policy._policy import Expected, Policy, Run
from lowtide.policy._rules import checked
from lowtide.records import CallSite, Decision


class Ledger:
    """Which expectations were met, over all regions that were installed together.

    Args:
        policies: of the regions.
        regions: their names.

    Attributes:
        undo: takes the regions out again: a policy that the first step refuses is not left installed.
    """

    def __init__(self, policies: Iterable[Policy], regions: Iterable[str]) -> None:
        self._open = list(dict.fromkeys(expected for policy in policies for expected in policy.expects()))
        self._near: dict[Matcher, dict[str, None]] = {matcher: {} for expected in self._open for matcher in expected.matchers}
        self._in_place: dict[Matcher, CallSite] = {}
        self._waiting = dict.fromkeys(regions)
        self._replayed, self._told = False, False
        self._compiled = ""
        self._watched: list[Any] = []
        self.undo: Callable[[], None] = _nothing

    def watch(self, region: Any) -> None:
        """Be told when a region runs, until there is nothing left to be met."""
        if self._open:
            region.listener = self
            self._watched.append(region)

    def see(self, site: CallSite) -> None:
        """A call of the first run of a region."""
        if self._open:
            self._open = [expected for expected in self._open if not self._met(expected, site)]

    def see_in_place(self, site: CallSite) -> None:
        """A call that writes to an argument: what to say of it, should nothing else match."""
        for expected in self._open:
            for matcher in expected.matchers:
                if matcher.matches(site):
                    self._in_place.setdefault(matcher, site)

    def see_compiled(self, name: str) -> None:
        """Code that is compiled inside a region, of which no calls are seen."""
        self._compiled = self._compiled or name

    def _met(self, expected: Expected, site: CallSite) -> bool:
        for matcher in expected.matchers:
            if matcher.matches(site):
                return True
            self._near[matcher].update(dict.fromkeys(matcher.near(site)))
        return False

    def called(self, region: str) -> None:
        """A region is about to run.

        Raises:
            PolicyError: all have run before, and some expectation was not met.
        """
        if region in self._waiting:
            del self._waiting[region]
        else:
            self._judge()

    def replayed(self) -> None:
        """A replay is about to begin: backward has begun.

        Raises:
            PolicyError: all regions have run, and some expectation was not met.
        """
        self._replayed = True
        if not self._waiting:
            self._judge()

    def _judge(self) -> None:
        if not self._open:
            self._close()
            return
        if not self._waiting:
            self.refuse()
            raise PolicyError(self._message(self._open[0]))
        if self._replayed and not self._told:
            self._told = True
            names = ", ".join(map(repr, list(self._waiting)[:3]))
            warnings.warn(f"{self._open[0].rule} has matched nothing so far, and some regions have not run yet: {names}", stacklevel=4)

    def refuse(self) -> None:
        """The policy does not suit the step: take it out."""
        undo = self.undo
        self._close()
        undo()

    def _close(self) -> None:
        self.undo = _nothing
        while self._watched:
            self._watched.pop().listener = None

    def _message(self, expected: Expected) -> str:
        written = next((self._in_place[matcher] for matcher in expected.matchers if matcher in self._in_place), None)
        if written is not None:
            return (
                f"the rule {expected.rule} matched nothing that can be kept: {written.function_name} in "
                f"{written.module or written.region!r} works in place: its result is its argument, written over. Call the form that makes "
                "a tensor of its own (relu for relu_, inplace=False), or keep the call that made its argument"
            )
        found = dict.fromkeys(text for matcher in expected.matchers for text in self._near[matcher])
        hint = next((hint for hint in (close(_bare(matcher), list(found)) for matcher in expected.matchers) if hint), "")
        if self._compiled:
            hint += (
                f"; it cannot see what torch.compile compiles inside a region ({self._compiled}): compile around the region instead, "
                "torch.compile(lowtide.checkpoint(function, policy=...)), or apply the policy to the model and compile that"
            )
        hint = hint or (f": there was {', '.join(list(found)[:6])}{' …' if len(found) > 6 else ''}" if found else "")
        return f"the rule {expected.rule} matched nothing in the first step{hint}"


def _nothing() -> None:
    """There is nothing to take out."""


def _bare(matcher: Matcher) -> str:
    """A matcher's text without what all of its kind have: ``op('aten.mm')`` is ``aten.mm``."""
    return repr(matcher).partition("(")[2].rstrip(")").strip("'")


class _Current(threading.local):
    run: Run | None = None
    position = -1


class Decider:
    """Decides for one region, as the engine wants it: call by call, in the order in which they ran.

    Attributes:
        policy: what says so.
    """

    def __init__(self, policy: Policy, ledger: Ledger | None = None) -> None:
        self.policy = policy
        self._ledger = ledger
        self._current = _Current()

    @property
    def alike(self) -> Any:
        """Where this is equal, two of them may decide alike: one policy, or what one plan keeps in several regions."""
        return id(self._ledger) if isinstance(self.policy, KeepCalls) else self.policy

    def watch(self, region: Any) -> None:
        """Have the ledger told when a region runs."""
        if self._ledger is not None:
            self._ledger.watch(region)

    def refused(self, site: CallSite) -> None:
        """A call whose results cannot be kept, for it writes them over an argument: a rule may have been about it."""
        if self._ledger is not None:
            self._ledger.see_in_place(site)

    def not_seen(self, name: str) -> None:
        """Compiled code in the region, of which no calls are seen: a rule may have been about some."""
        if self._ledger is not None:
            self._ledger.see_compiled(name)

    def decide(self, site: CallSite) -> Decision:
        """What becomes of the results of a call.

        Raises:
            PolicyError: the policy said something that is no decision.
        """
        current = self._current
        if current.run is None or site.position <= current.position:
            current.run = Run()
        current.position = site.position
        if self._ledger is not None:
            self._ledger.see(site)
        try:
            vote: Any = self.policy.vote(site, current.run)
            return Decision.RECOMPUTE if vote is None else checked(vote, self.policy, site)
        except PolicyError:
            if self._ledger is not None:
                self._ledger.refuse()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return Decider, (self.policy,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Decider:
        return Decider(self.policy)

    def __repr__(self) -> str:
        return repr(self.policy)
