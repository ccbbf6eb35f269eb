"""``checkpoint`` with policies in every form that ``apply`` takes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from torch import nn

from lowtide import engine
from lowtide.errors import InvalidInputError
from lowtide.policy._ledger import Decider, Ledger
from lowtide.policy._named import FromTrace, parse_policy
from lowtide.policy._policy import Policy
from lowtide.policy._rules import as_policy
from lowtide.records import CallSite, Decision

P = ParamSpec("P")
R = TypeVar("R")


def read_policy(policy: Policy | str | Callable[[CallSite], Decision]) -> Policy:
    """A policy, the name of one, or the function that decides for one.

    Raises:
        InvalidInputError: it is none of them, or has to be made from a trace first.
    """
    found = parse_policy(policy) if isinstance(policy, str) else as_policy(policy)
    if isinstance(found, FromTrace):
        raise InvalidInputError(
            f"the policy {found.text!r} is made from a trace of a step: use lowtide.fit(model, step, budget) for a plan, or "
            "lowtide.policy.cheap(lowtide.trace(model, step))"
        )
    return found


@overload
def checkpoint(fn: Callable[P, R], **options: Any) -> Callable[P, R]: ...
@overload
def checkpoint(fn: None = None, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def checkpoint(fn: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Make a callable whose intermediate results are computed again in backward instead of being kept.

    Args:
        fn: a function, a module or any other callable. Without it, what comes back is a decorator.
        **options: fields of ``Options``. ``policy`` may be a policy, the name of one (``"selective"``), or a function of a ``CallSite``.

    Returns:
        A callable with the signature of ``fn``: what it is called with is all passed on.

    Raises:
        InvalidInputError: ``fn`` cannot be called, an option is unknown, or the policy is none.
        PolicyError: in its first step, from a policy of which a rule matched nothing, or that said something that is no decision.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> checkpoint(torch.sin)(x).sum().backward()
    >>> x.grad.shape
    torch.Size([3])
    """
    if fn is None:
        return lambda given: checkpoint(given, **options)
    policy = options.pop("policy", None)
    if policy is None:
        return engine.checkpoint(fn, **options)
    read = read_policy(policy)
    name = options.get("name") or getattr(fn, "__qualname__", None) or type(fn).__qualname__
    decider = _decider_of(fn, read, name)
    made = engine.checkpoint(fn, policy=decider, **options)
    decider.watch(made.__lowtide_region__)  # type: ignore[attr-defined]
    return made


_DECIDERS: weakref.WeakKeyDictionary[Any, dict[tuple[Policy, str], Decider]] = weakref.WeakKeyDictionary()


def _decider_of(fn: Callable[..., Any], policy: Policy, name: str) -> Decider:
    """One for each piece of code: made a region anew in every step, it goes by what was decided in the first."""
    try:
        known = _DECIDERS.setdefault(_code_of(fn), {})
        return known.setdefault((policy, name), Decider(policy, Ledger([policy], [name])))
    except TypeError:  # of a kind that cannot be referred to weakly, or a policy that cannot be compared
        return Decider(policy, Ledger([policy], [name]))


def _code_of(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    return owner if isinstance(owner, nn.Module) else getattr(fn, "__code__", fn)
