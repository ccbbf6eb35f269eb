"""Policies: values that say which modules are replayed, and which results inside them are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from lowtide.policy._blocks import blocks
from lowtide.policy._matchers import Matcher
from lowtide.records import CallSite, Decision

Paths = tuple[str, ...]


@dataclass
class Run:
    """What is counted while the calls of one region are decided, one after the other.

    Attributes:
        counts: by the ``id`` of the rule that counts.
    """

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, rule: object, amount: int) -> int:
        """Add to a rule's count; returns what it is then."""
        self.counts[id(rule)] = found = self.counts.get(id(rule), 0) + amount
        return found


@dataclass(frozen=True)
class Expected:
    """Something that a rule says is there: the first step has to show one of these.

    Attributes:
        rule: as people wrote it.
        matchers: one of which must match.
    """

    rule: str
    matchers: tuple[Matcher, ...]


@dataclass(frozen=True)
class PolicyRegion:
    """Modules that a policy makes a region.

    Attributes:
        paths: of one module, or of several consecutive siblings that are replayed as one.
        policy: decides what is kept inside.
    """

    paths: Paths
    policy: Policy


@dataclass(frozen=True, repr=False)
class Policy:
    """Says which modules of a model are replayed, and which results inside them are kept.

    A value: it never changes, compares by what it says, and is written as JSON unless it holds a function without a name.
    """

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What it says of a call; ``None`` if nothing. What no rule speaks of is recomputed."""
        raise NotImplementedError

    def expects(self) -> tuple[Expected, ...]:
        """What has to be there in the first step."""
        return ()

    def regions(self, model: nn.Module) -> tuple[PolicyRegion, ...]:
        """Which modules are replayed: the model's blocks, one by one, unless the policy chooses others.

        Raises:
            PolicyError: the model has no blocks, or not those that the policy chooses.
        """
        chosen = self.chosen(model)
        return tuple(PolicyRegion((path,), self) for path in blocks(model)) if chosen is None else chosen

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """The modules that the policy chooses; ``None`` if it leaves that open."""
        return None

    @property
    def whole(self) -> bool:
        """Whether it keeps nothing inside the modules that it chooses, but what every preset keeps."""
        return False

    def to_json(self) -> str:
        """Write as JSON, for ``policy_from_json``.

        Raises:
            InvalidInputError: it holds a function that cannot be found by a name, such as a lambda.
        """
        from lowtide.policy._json import encode

        return encode(self)
