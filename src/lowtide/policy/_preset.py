"""A policy that has a name: what it is made of is shown by its name and arguments alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.policy._match import op
from lowtide.policy._matchers import Matcher, ToHost
from lowtide.policy._policy import Expected, Policy, PolicyRegion, Run
from lowtide.policy._rules import ANY, NONE, FirstOf, Rule
from lowtide.records import CallSite, Decision

COMMUNICATION = op("_c10d_functional.*", "_c10d_functional_autograd.*", "c10d.*", "_dtensor.*", "symm_mem.*", "deepep.*")
"""What other processes take part in: a replay would have to wait for them again."""

ROUTING = op("aten.topk", "aten.sort", "aten.argmax", "aten.argmin", "aten.multinomial", "aten.nonzero", "aten.bincount", "aten.histc")
"""Choices: where values are nearly equal, a replay that rounds otherwise would choose otherwise."""

TO_HOST = ToHost() | op("Tensor.cpu", "Tensor.item", "Tensor.tolist", "aten._local_scalar_dense")
"""Copies that the device waits for."""

AMAX = op("aten.amax", "aten.amin", "aten.aminmax", "aten.max.default", "aten.min.default")
"""Statistics that scales are made from; they are a few bytes, and kernels for low precision compute them twice otherwise."""

ALWAYS = Rule(Decision.KEEP, (COMMUNICATION, ROUTING, TO_HOST, AMAX), NONE)
"""What every preset keeps, whatever else it does: it is small, dear or may come out otherwise."""


@dataclass(frozen=True, repr=False)
class Preset(Policy):
    """A policy with a name.

    Attributes:
        name: of the function that made it.
        arguments: that it was given, by name, as text.
        policy: what it is made of.
    """

    name: str
    arguments: tuple[tuple[str, str], ...]
    policy: Policy

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What it is made of says."""
        return self.policy.vote(site, run)

    def expects(self) -> tuple[Expected, ...]:
        """What it is made of expects, in its own name."""
        return tuple(Expected(self._rule(expected), expected.matchers) for expected in self.policy.expects())

    def _rule(self, expected: Expected) -> str:
        """The lists of ops that presets have are no help to read."""
        return repr(self) if len(expected.matchers) > 1 else f"{self!r}: {expected.rule}"

    @property
    def whole(self) -> bool:
        """Whether nothing else is kept."""
        return self.policy.whole or self.policy == FirstOf((ALWAYS,))

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """The modules that what it is made of chooses."""
        return self.policy.chosen(model)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={text}' for name, text in self.arguments)})"


def preset(name: str, *policies: Policy, **arguments: Any) -> Policy:
    """A preset: what every preset keeps, then the first of these policies that says anything."""
    return Preset(name, tuple((key, repr(value)) for key, value in arguments.items()), FirstOf((ALWAYS, *policies)))


def keep_any(*matchers: Matcher) -> Policy:
    """Keep what any of these matches; one of them has to be there."""
    return Rule(Decision.KEEP, matchers, ANY)
