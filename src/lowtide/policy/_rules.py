"""Rules, and the small functions that combine them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lowtide.errors import InvalidInputError, PolicyError
from lowtide.policy._functions import shown
from lowtide.policy._matchers import Matcher
from lowtide.policy._policy import Expected, Policy, PolicyRegion, Run
from lowtide.records import CallSite, Decision
from lowtide.units import format_bytes, parse_bytes

EACH, ANY, NONE = "each", "any", "none"


@dataclass(frozen=True, repr=False)
class Rule(Policy):
    """One decision for the calls that a matcher picks out; nothing is said of others.

    Attributes:
        decision: for them.
        matchers: any of which picks out a call.
        needs: whether ``each`` of them, ``any`` or ``none`` has to match something in the first step.
    """

    decision: Decision
    matchers: tuple[Matcher, ...]
    needs: str = EACH

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """The decision, if a matcher picks the call out."""
        return self.decision if any(matcher.matches(site) for matcher in self.matchers) else None

    def expects(self) -> tuple[Expected, ...]:
        """Its matchers."""
        alternatives = tuple(one for matcher in self.matchers for one in matcher.alternatives())
        if self.needs == NONE or not alternatives:
            return ()
        if self.needs == ANY:
            return (Expected(repr(self), alternatives),)
        return tuple(Expected(f"{self.decision.value}({one!r})", (one,)) for one in alternatives)

    def __repr__(self) -> str:
        return f"{self.decision.value}({', '.join(map(repr, self.matchers))})"


@dataclass(frozen=True, repr=False)
class By(Policy):
    """Decides by a function.

    Attributes:
        function: gets the call, returns ``Decision.KEEP`` or ``Decision.RECOMPUTE``.
    """

    function: Callable[[CallSite], Decision]

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What the function says.

        Raises:
            PolicyError: something that is no decision.
        """
        return checked(self.function(site), self, site)

    def __repr__(self) -> str:
        return f"by({shown(self.function)})"


def checked(decision: object, rule: object, site: CallSite) -> Decision:
    """A decision that a region can carry out.

    Raises:
        PolicyError: it is something else.
    """
    if isinstance(decision, Decision) and decision in (Decision.KEEP, Decision.RECOMPUTE):
        return decision
    raise PolicyError(
        f"a policy must say Decision.KEEP or Decision.RECOMPUTE of every call, but {rule!r} returned {decision!r} "
        f"for {shown(site.function)} in {site.module or site.region!r}: return Decision.RECOMPUTE for what need not be kept"
    )


@dataclass(frozen=True, repr=False)
class FirstOf(Policy):
    """The first of several policies that says anything."""

    policies: tuple[Policy, ...]

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What the first says that says anything."""
        return next((vote for vote in (policy.vote(site, run) for policy in self.policies) if vote is not None), None)

    def expects(self) -> tuple[Expected, ...]:
        """What each expects."""
        return tuple(expected for policy in self.policies for expected in policy.expects())

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """The modules of the first that chooses any."""
        return _chosen(self, self.policies, model)

    def __repr__(self) -> str:
        return f"first_of({', '.join(map(repr, self.policies))})"


@dataclass(frozen=True, repr=False)
class Both(Policy):
    """Keeps what all of several policies keep."""

    policies: tuple[Policy, ...]

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """Keep, if all say so."""
        votes = [policy.vote(site, run) for policy in self.policies]  # each is asked, for each may count
        return Decision.KEEP if all(vote is Decision.KEEP for vote in votes) else Decision.RECOMPUTE

    def expects(self) -> tuple[Expected, ...]:
        """What each expects."""
        return tuple(expected for policy in self.policies for expected in policy.expects())

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """The modules of the first that chooses any."""
        return _chosen(self, self.policies, model)

    def __repr__(self) -> str:
        return f"both({', '.join(map(repr, self.policies))})"


def _chosen(whole: Policy, policies: tuple[Policy, ...], model: nn.Module) -> tuple[PolicyRegion, ...] | None:
    found = next((regions for regions in (policy.chosen(model) for policy in policies) if regions is not None), None)
    return None if found is None else tuple(replace(region, policy=whole) for region in found)


@dataclass(frozen=True, repr=False)
class Around(Policy):
    """Changes what another policy says. The other chooses the modules."""

    policy: Policy

    def expects(self) -> tuple[Expected, ...]:
        """What the other expects."""
        return self.policy.expects()

    @property
    def whole(self) -> bool:
        """As the other."""
        return self.policy.whole

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """The modules of the other."""
        return _chosen(self, (self.policy,), model)


@dataclass(frozen=True, repr=False)
class LimitBytes(Around):
    """Keeps what another keeps, as long as it is not too much.

    Attributes:
        limit_bytes: the most that one call of a region keeps.
    """

    limit_bytes: int

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What the other says, unless it would be too much."""
        vote = self.policy.vote(site, run)
        if vote is not Decision.KEEP:
            return vote
        if run.add(self, 0) + site.output_bytes > self.limit_bytes:
            return Decision.RECOMPUTE
        run.add(self, site.output_bytes)
        return vote

    def __repr__(self) -> str:
        return f"limit_bytes({self.policy!r}, {format_bytes(self.limit_bytes)!r})"


@dataclass(frozen=True, repr=False)
class OneIn(Around):
    """Keeps the first of every few calls that another keeps.

    Attributes:
        count: of so many, one is kept.
    """

    count: int

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What the other says of the first, the (count + 1)-th and so on; the rest is recomputed."""
        vote = self.policy.vote(site, run)
        if vote is not Decision.KEEP:
            return vote
        return vote if run.add(self, 1) % self.count == 1 % self.count else Decision.RECOMPUTE

    def __repr__(self) -> str:
        return f"one_in({self.count}, {self.policy!r})"


def keep(*matchers: Matcher) -> Policy:
    """Keep the results of calls that any of these matchers picks out.

    Args:
        *matchers: from ``op``, ``module``, ``inside``, ``named``, ``size``, ``shape``, ``is_random`` or ``anything``, joined with ``&``,
            ``|`` and ``~``. Each has to match something in the first step.

    >>> from lowtide.policy import inside, op, size
    >>> keep(op("aten.mm", "aten.bmm"), inside("**.attention") & size(at_least="1MiB"))
    keep(op('aten.mm') | op('aten.bmm'), inside('**.attention') & size(at_least='1.00 MiB'))
    """
    return Rule(Decision.KEEP, _matchers(matchers, "keep"))


def recompute(*matchers: Matcher) -> Policy:
    """Recompute the calls that any of these matchers picks out; for ``first_of``, before a rule that keeps more.

    Args:
        *matchers: as for ``keep``.
    """
    return Rule(Decision.RECOMPUTE, _matchers(matchers, "recompute"))


def _matchers(given: tuple[Any, ...], what: str) -> tuple[Matcher, ...]:
    for matcher in given:
        if not isinstance(matcher, Matcher):
            raise InvalidInputError(f"{what}() takes matchers such as op('aten.mm') or module('**.mlp'), not {matcher!r}")
    if not given:
        raise InvalidInputError(f"{what}() was given nothing to match: write {what}(anything()) for every call")
    return given


def by(function: Callable[[CallSite], Decision]) -> Policy:
    """Decide by a function of the call. ``lowtide.apply(model, function)`` is short for it.

    Args:
        function: returns ``Decision.KEEP`` or ``Decision.RECOMPUTE`` for each ``CallSite``; anything else is an error at once.
    """
    return as_policy(function)


def as_policy(value: Any) -> Policy:
    """A policy, or the function that decides for one.

    Raises:
        InvalidInputError: it is neither.
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, (Matcher, type)) or not callable(value):
        hint = f": write keep({value!r})" if isinstance(value, Matcher) else ""
        raise InvalidInputError(f"{value!r} is no policy and no function of a call site{hint}")
    return By(value)


def first_of(*policies: Policy | Callable[[CallSite], Decision]) -> Policy:
    """Decide by the first of several policies that says anything of a call.

    >>> from lowtide.policy import inside, op
    >>> first_of(recompute(inside("**.router.gate")), keep(op("aten.mm")))
    first_of(recompute(inside('**.router.gate')), keep(op('aten.mm')))
    """
    return FirstOf(_several(policies, "first_of"))


def both(*policies: Policy | Callable[[CallSite], Decision]) -> Policy:
    """Keep what all of several policies keep; recompute the rest."""
    return Both(_several(policies, "both"))


def _several(policies: tuple[Any, ...], what: str) -> tuple[Policy, ...]:
    if not policies:
        raise InvalidInputError(f"{what}() was given no policy")
    return tuple(map(as_policy, policies))


def limit_bytes(policy: Policy | Callable[[CallSite], Decision], limit: int | str) -> Policy:
    """Keep what a policy keeps, in order, as long as one call of a region keeps no more than so many bytes.

    Args:
        policy: what would be kept.
        limit: bytes, as a number or as text such as ``"64MiB"``.

    Raises:
        BudgetError: the limit cannot be read.
    """
    return LimitBytes(as_policy(policy), parse_bytes(limit) if isinstance(limit, str) else limit)


def one_in(count: int, policy: Policy | Callable[[CallSite], Decision]) -> Policy:
    """Keep the first of every ``count`` calls that a policy keeps in a call of a region; recompute the others.

    Raises:
        InvalidInputError: the count is not above zero.
    """
    if count < 1:
        raise InvalidInputError(f"one_in() needs a count above zero, not {count}")
    return OneIn(as_policy(policy), count)
