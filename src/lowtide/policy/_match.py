"""The functions that make matchers: what people write."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload, OpOverloadPacket

from lowtide.errors import InvalidInputError
from lowtide.policy._functions import canonical
from lowtide.policy._matchers import AnyOf, Anything, Bytes, MadeOf, Matcher, Named, Op, Random, Shaped
from lowtide.policy._module_matchers import InModule
from lowtide.units import parse_bytes


def _joined(matchers: tuple[Matcher, ...], what: str) -> Matcher:
    if not matchers:
        raise InvalidInputError(f"{what}() was given nothing to match: name one thing or more")
    return matchers[0] if len(matchers) == 1 else AnyOf(matchers)


def op(*targets: Any) -> Matcher:
    """Match calls by op: ``op("aten.mm", torch.ops.aten.bmm.default, F.linear)``.

    Args:
        *targets: overloads, packets (all their overloads), names of either, functions (the call itself, by whichever method or
            operator it is made), or subclasses of ``torch.autograd.Function``.

    Raises:
        InvalidInputError: there is no such op or function.
    """
    return _joined(tuple(Op(canonical(target)) for target in targets), "op")


def made_of(*names: str | OpOverload | OpOverloadPacket) -> Matcher:
    """Match calls that run one of these ops, and besides nothing but copies and sums: no function that is made of many ops.

    Raises:
        InvalidInputError: there is no such op, or it is a function.
    """
    found = [canonical(name) for name in names]
    for name in found:
        if not isinstance(name, str):
            raise InvalidInputError(f"made_of() takes ops such as 'aten.mm', not the function {name!r}")
    if not found:
        raise InvalidInputError("made_of() was given nothing to match: name one op or more")
    return MadeOf(tuple(str(name) for name in found))


def module(*targets: type | str) -> Matcher:
    """Match the calls of modules, whose results are kept as one: ``module("blocks.*.mlp", MyKernel)``.

    Args:
        *targets: classes, or paths from the model, where ``*`` stands for one name and ``**`` for any number.
    """
    return _joined(tuple(InModule(target, False) for target in targets), "module")


def inside(*targets: type | str) -> Matcher:
    """Match every call inside modules, given as for ``module``."""
    return _joined(tuple(InModule(target, True) for target in targets), "inside")


def named(*patterns: str) -> Matcher:
    """Match what was named with ``lowtide.name``; ``*`` stands for anything."""
    return _joined(tuple(Named(pattern) for pattern in patterns), "named")


def size(*, at_least: int | str = 0, at_most: int | str | None = None) -> Matcher:
    """Match calls by the bytes of their results: ``size(at_least="1MiB")``.

    Raises:
        BudgetError: a number of bytes cannot be read.
    """
    return Bytes(_bytes(at_least), None if at_most is None else _bytes(at_most))


def _bytes(count: int | str) -> int:
    return parse_bytes(count) if isinstance(count, str) else count


def shape(*sizes: int | None) -> Matcher:
    """Match calls that return a tensor of this shape; ``None`` stands for any size."""
    return Shaped(sizes)


def is_random() -> Matcher:
    """Match calls that draw random numbers."""
    return Random()


def anything() -> Matcher:
    """Match every call."""
    return Anything()
