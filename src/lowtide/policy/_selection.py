"""Policies that choose modules: which blocks, in what segments, or modules of given classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.errors import InvalidInputError, PolicyError
from lowtide.policy._blocks import runs
from lowtide.policy._full import full
from lowtide.policy._functions import close
from lowtide.policy._policy import Expected, Policy, PolicyRegion, Run
from lowtide.policy._rules import Around, as_policy
from lowtide.records import CallSite, Decision

Decider = Policy | Callable[[CallSite], Decision]


@dataclass(frozen=True, repr=False)
class Selection(Around):
    """Some of the regions that another policy makes."""

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What the other says."""
        return self.policy.vote(site, run)

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """Some regions of the other.

        Raises:
            PolicyError: none is left.
        """
        regions = self.policy.regions(model)
        places = self.places(len(regions))
        if regions and not places:
            raise PolicyError(f"{self!r} leaves no region to replay: {self.policy!r} makes {len(regions)} in this model")
        return tuple(regions[index] for index in places)

    def places(self, count: int) -> list[int]:
        """Which of so many regions, in order."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Every(Selection):
    """The first of every few regions.

    Attributes:
        count: of so many, one.
    """

    count: int

    def places(self, count: int) -> list[int]:
        """The first, the (n + 1)-th, and so on."""
        return list(range(0, count, self.count))

    def __repr__(self) -> str:
        return f"every({self.count}, {self.policy!r})"


@dataclass(frozen=True, repr=False)
class SkipLast(Selection):
    """All regions but the last few.

    Attributes:
        count: how many are left out.
    """

    count: int

    def places(self, count: int) -> list[int]:
        """All but the last."""
        return list(range(max(count - self.count, 0)))

    def __repr__(self) -> str:
        return f"skip_last({self.count}, {self.policy!r})"


@dataclass(frozen=True, repr=False)
class Only(Selection):
    """Some regions.

    Attributes:
        where: ``first``, ``last``, ``middle`` or ``fraction``.
        amount: how many; for ``fraction`` the share of them, spread evenly.
    """

    where: str
    amount: float

    def places(self, count: int) -> list[int]:
        """Those asked for, as far as there are so many."""
        if self.where == "fraction":
            wanted = max(round(self.amount * count), min(count, 1))
            return [index * count // wanted for index in range(wanted)]
        wanted = min(int(self.amount), count)
        start = {"first": 0, "last": count - wanted, "middle": (count - wanted) // 2}[self.where]
        return list(range(start, start + wanted))

    def __repr__(self) -> str:
        return f"only({self.policy!r}, {self.where}={self.amount:g})"


@dataclass(frozen=True, repr=False)
class Segments(Around):
    """The regions of another policy joined into segments of consecutive siblings, each replayed as one.

    Attributes:
        length: of a segment, or ``None`` for about the square root of their number.
    """

    length: int | None

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What the other says."""
        return self.policy.vote(site, run)

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """The regions of the other, joined."""
        regions = self.policy.regions(model)
        single = {region.paths[0]: region.policy for region in regions if len(region.paths) == 1}
        if len(single) != len(regions):
            raise PolicyError(f"{self!r} joins single modules into segments, but {self.policy!r} makes segments already")
        length = self.length or math.ceil(math.sqrt(len(single)))
        return tuple(PolicyRegion(part, single[part[0]]) for run in runs(tuple(single)) for part in _parts(run, length))

    def __repr__(self) -> str:
        return f"segments({'' if self.length is None else f'{self.length}, '}{self.policy!r})"


def _parts(paths: tuple[str, ...], length: int) -> list[tuple[str, ...]]:
    return [paths[start : start + length] for start in range(0, len(paths), length)]


@dataclass(frozen=True, repr=False)
class ByLayerType(Policy):
    """Modules of given classes, each with a policy of its own.

    Attributes:
        layers: class, or its name, and policy.
    """

    layers: tuple[tuple[type | str, Policy], ...]

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What the policy of the innermost such module around the call says."""
        for kind in reversed(site.module_types):
            policy = self._policy_of(kind)
            if policy is not None:
                return policy.vote(site, run)
        return None

    def _policy_of(self, kind: type) -> Policy | None:
        return next((policy for layer, policy in self.layers if _is_kind(kind, layer)), None)

    def expects(self) -> tuple[Expected, ...]:
        """What each policy expects."""
        return tuple(expected for _, policy in self.layers for expected in policy.expects())

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """The outermost modules of these classes.

        Raises:
            PolicyError: the model has none of one of them.
        """
        for layer, _ in self.layers:
            if not any(_is_kind(type(module), layer) for module in model.modules()):
                raise PolicyError(
                    f"{self!r}: the model has no module of class {_kind_name(layer)}{close(_kind_name(layer), _kinds_in(model))}"
                )
        found: list[PolicyRegion] = []
        for path, module in model.named_modules():
            policy = self._policy_of(type(module))
            if policy is not None and not any(path.startswith(f"{region.paths[0]}.") or not region.paths[0] for region in found):
                found.append(PolicyRegion((path,), policy))
        return tuple(found)

    def __repr__(self) -> str:
        layers = ", ".join(f"{_kind_name(layer)}: {policy!r}" for layer, policy in self.layers)
        return f"by_layer_type({{{layers}}})"


def _is_kind(kind: type, wanted: type | str) -> bool:
    return any(base.__name__ == wanted for base in kind.__mro__) if isinstance(wanted, str) else issubclass(kind, wanted)


def _kind_name(kind: type | str) -> str:
    return kind if isinstance(kind, str) else kind.__qualname__


def _kinds_in(model: nn.Module) -> list[str]:
    return sorted({type(module).__name__ for module in model.modules()})


def every(count: int, policy: Decider | None = None) -> Policy:
    """Replay the first of every ``count`` regions of a policy, and leave the others as they are.

    Args:
        count: of so many, one.
        policy: whose regions; every block, recomputed, if not given.

    Raises:
        InvalidInputError: the count is not above zero.
    """
    return Every(_inner(policy), _above_zero(count, "every"))


def skip_last(count: int, policy: Decider | None = None) -> Policy:
    """Leave out the last regions of a policy: backward needs them first, so that replaying them saves least.

    Args:
        count: how many are left out.
        policy: whose regions; every block, recomputed, if not given.

    Raises:
        InvalidInputError: the count is not above zero.
    """
    return SkipLast(_inner(policy), _above_zero(count, "skip_last"))


def only(
    policy: Decider | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
    middle: int | None = None,
    fraction: float | None = None,
) -> Policy:
    """Replay some regions of a policy, and leave the others as they are.

    Args:
        policy: whose regions; every block, recomputed, if not given.
        first, last, middle: so many from the start, the end, the middle.
        fraction: a share of them, between 0 and 1, spread evenly.

    Raises:
        InvalidInputError: not exactly one of them is given, or it is out of range.
    """
    given = {"first": first, "last": last, "middle": middle, "fraction": fraction}
    [*chosen] = [(where, amount) for where, amount in given.items() if amount is not None]
    if len(chosen) != 1:
        raise InvalidInputError(f"only() takes one of first, last, middle and fraction; found {', '.join(w for w, _ in chosen) or 'none'}")
    where, amount = chosen[0]
    if where == "fraction" and not 0 < amount <= 1:
        raise InvalidInputError(f"a fraction lies above 0 and at most at 1; found {amount}")
    return Only(_inner(policy), where, amount if where == "fraction" else _above_zero(int(amount), "only"))


def segments(length: int | None = None, policy: Decider | None = None) -> Policy:
    """Join the regions of a policy into segments of consecutive siblings, each replayed as one: only its inputs are kept.

    Args:
        length: of a segment; about the square root of their number if not given.
        policy: whose regions; every block, recomputed, if not given.

    Raises:
        InvalidInputError: the length is not above zero.
    """
    return Segments(_inner(policy), None if length is None else _above_zero(length, "segments"))


def by_layer_type(layers: Mapping[type | str, Decider]) -> Policy:
    """Replay modules of given classes, each with a policy of its own; where they are nested, the outermost are the regions.

    Args:
        layers: class, or its name, to policy.

    Raises:
        InvalidInputError: no class is given.
    """
    if not layers:
        raise InvalidInputError("by_layer_type() was given no class")
    return ByLayerType(tuple((kind, as_policy(policy)) for kind, policy in layers.items()))


def _inner(policy: Any) -> Policy:
    return full() if policy is None else as_policy(policy)


def _above_zero(count: int, what: str) -> int:
    if count < 1:
        raise InvalidInputError(f"{what}() needs a count above zero, not {count}")
    return count
