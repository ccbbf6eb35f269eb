"""What picks out calls in a region: by op, module, name, size, shape. Values, joined with ``&``, ``|`` and ``~``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from lowtide.policy._functions import base_name, shown
from lowtide.records import CallSite
from lowtide.units import format_bytes


@dataclass(frozen=True, repr=False)
class Matcher:
    """Picks out call sites. ``a | b`` matches what either matches, ``a & b`` what both match, ``~a`` everything else."""

    def matches(self, site: CallSite) -> bool:
        """Whether it picks out this call."""
        raise NotImplementedError

    def alternatives(self) -> tuple[Matcher, ...]:
        """What it matches is what one of these matches: each is expected to match something."""
        return (self,)

    def near(self, site: CallSite) -> Iterable[str]:
        """What was there that could have been meant, for the error when nothing matched."""
        return ()

    def __or__(self, other: Matcher) -> Matcher:
        return AnyOf((*self.alternatives(), *other.alternatives()))

    def __and__(self, other: Matcher) -> Matcher:
        return AllOf((self, other))

    def __invert__(self) -> Matcher:
        return Not(self)


@dataclass(frozen=True, repr=False)
class AnyOf(Matcher):
    """What one of several matches."""

    matchers: tuple[Matcher, ...]

    def matches(self, site: CallSite) -> bool:
        """Whether one of them picks it out."""
        return any(matcher.matches(site) for matcher in self.matchers)

    def alternatives(self) -> tuple[Matcher, ...]:
        """Each of them."""
        return tuple(alternative for matcher in self.matchers for alternative in matcher.alternatives())

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.matchers))


@dataclass(frozen=True, repr=False)
class AllOf(Matcher):
    """What all of several match."""

    matchers: tuple[Matcher, ...]

    def matches(self, site: CallSite) -> bool:
        """Whether all of them pick it out."""
        return all(matcher.matches(site) for matcher in self.matchers)

    def near(self, site: CallSite) -> Iterable[str]:
        """What could have been meant by one of them."""
        return (text for matcher in self.matchers for text in matcher.near(site))

    def __repr__(self) -> str:
        return " & ".join(f"({matcher!r})" if isinstance(matcher, AnyOf) else repr(matcher) for matcher in self.matchers)


@dataclass(frozen=True, repr=False)
class Not(Matcher):
    """What another does not match."""

    matcher: Matcher

    def matches(self, site: CallSite) -> bool:
        """Whether the other does not pick it out."""
        return not self.matcher.matches(site)

    def __repr__(self) -> str:
        return f"~({self.matcher!r})" if isinstance(self.matcher, (AnyOf, AllOf)) else f"~{self.matcher!r}"


@dataclass(frozen=True, repr=False)
class Anything(Matcher):
    """Every call of a function."""

    def matches(self, site: CallSite) -> bool:
        """Whether it is a call of a function; a module is the calls inside it."""
        return site.level == "function"

    def alternatives(self) -> tuple[Matcher, ...]:
        """None: nothing in particular is expected."""
        return ()

    def __repr__(self) -> str:
        return "anything()"


@dataclass(frozen=True, repr=False)
class Op(Matcher):
    """Calls of a function that are, or run, an op.

    Attributes:
        target: name of an overload, a packet or a whole namespace (``c10d.*``); or a function, or an autograd ``Function``.
    """

    target: Any

    def matches(self, site: CallSite) -> bool:
        """Whether it is this function, or runs this op."""
        if site.level != "function":
            return False
        if not isinstance(self.target, str):
            return _is_function(self.target, site.function)
        return any(_is_op(self.target, str(op)) for op in site.ops) or _is_composite(self.target, site.function)

    def near(self, site: CallSite) -> Iterable[str]:
        """The ops and the function of the call."""
        return (*map(str, site.ops), shown(site.function)) if site.level == "function" else ()

    def __repr__(self) -> str:
        return f"op({shown(self.target)})"


@dataclass(frozen=True, repr=False)
class MadeOf(Matcher):
    """Calls of functions that run these ops, and besides them nothing but copies and sums.

    A function that is made of several ops is kept as a whole, with all that they saved: attention that is not fused runs products, but
    keeping it holds its matrix.

    Attributes:
        names: of overloads or packets.
    """

    names: tuple[str, ...]

    def matches(self, site: CallSite) -> bool:
        """Whether it runs one of these ops, and nothing else that matters."""
        wanted = [op for op in map(str, site.ops) if any(_is_op(name, op) for name in self.names)]
        return site.level == "function" and bool(wanted) and all(op in wanted or op.split(".")[1] in _MINOR for op in map(str, site.ops))

    def near(self, site: CallSite) -> Iterable[str]:
        """The ops of the call."""
        return map(str, site.ops) if site.level == "function" else ()

    def __repr__(self) -> str:
        return f"made_of({', '.join(map(repr, self.names))})"


_MINOR = frozenset({"_to_copy", "add", "add_", "clone", "copy_", "empty", "empty_strided", "fill_", "new_empty", "zeros"})


def _is_op(wanted: str, found: str) -> bool:
    return found == wanted or found.startswith(f"{wanted}.") or ("*" in wanted and fnmatchcase(found, wanted))


def _is_composite(wanted: str, function: Any) -> bool:
    """Whether a packet (``aten.linear``) stands for a function that is made of other ops."""
    namespace, _, name = wanted.partition(".")
    return namespace == "aten" and "." not in name and name == base_name(function)


def _is_function(wanted: Any, found: Any) -> bool:
    if found is wanted or found == wanted:
        return True
    if getattr(found, "__self__", None) is wanted or getattr(wanted, "__self__", None) is found:  # MyFunction.apply is its method
        return True
    name = base_name(wanted)
    return bool(name) and name == base_name(found)


@dataclass(frozen=True, repr=False)
class Named(Matcher):
    """Calls whose result was named with ``lowtide.name``.

    Attributes:
        pattern: the name, where ``*`` stands for anything.
    """

    pattern: str

    def matches(self, site: CallSite) -> bool:
        """Whether its result has such a name."""
        return any(fnmatchcase(name, self.pattern) for name in site.names)

    def near(self, site: CallSite) -> Iterable[str]:
        """Its names."""
        return site.names

    def __repr__(self) -> str:
        return f"named({self.pattern!r})"


@dataclass(frozen=True, repr=False)
class Bytes(Matcher):
    """Calls of functions by the bytes that they return.

    Attributes:
        at_least, at_most: both included.
    """

    at_least: int
    at_most: int | None

    def matches(self, site: CallSite) -> bool:
        """Whether what it returns is as large."""
        return (
            site.level == "function" and self.at_least <= site.output_bytes and (self.at_most is None or site.output_bytes <= self.at_most)
        )

    def near(self, site: CallSite) -> Iterable[str]:
        """How many bytes there were."""
        return (format_bytes(site.output_bytes),)

    def __repr__(self) -> str:
        limits = {"at_least": self.at_least or None, "at_most": self.at_most}
        return f"size({', '.join(f'{name}={format_bytes(value)!r}' for name, value in limits.items() if value is not None)})"


@dataclass(frozen=True, repr=False)
class Shaped(Matcher):
    """Calls of functions that return a tensor of a shape.

    Attributes:
        shape: ``None`` stands for any size.
    """

    shape: tuple[int | None, ...]

    def matches(self, site: CallSite) -> bool:
        """Whether one of its results has the shape."""
        return site.level == "function" and any(self._fits(shape) for shape in site.shapes)

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.shape) and all(wanted in (None, found) for wanted, found in zip(self.shape, shape, strict=True))

    def near(self, site: CallSite) -> Iterable[str]:
        """The shapes there were."""
        return (str(tuple(shape)) for shape in site.shapes)

    def __repr__(self) -> str:
        return f"shape({', '.join(map(str, self.shape))})"


@dataclass(frozen=True, repr=False)
class ToHost(Matcher):
    """Calls that copy from an accelerator to host memory."""

    def matches(self, site: CallSite) -> bool:
        """Whether it does."""
        return site.level == "function" and site.to_host

    def __repr__(self) -> str:
        return "to_host()"


@dataclass(frozen=True, repr=False)
class Random(Matcher):
    """Calls that draw random numbers."""

    def matches(self, site: CallSite) -> bool:
        """Whether it does."""
        return site.level == "function" and site.random

    def __repr__(self) -> str:
        return "is_random()"
