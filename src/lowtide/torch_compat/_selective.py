"""PyTorch's selective contexts, made safe where they are silently wrong.

The modes are PyTorch's own, since that is what its documentation describes: every op under autograd passes through them. What is
added: a policy that answers with something that is no decision is refused at once, and random ops that are replayed draw
what they drew, although ops that were kept no longer draw before them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

from lowtide._torch_private import CachedMode, CachingMode

Policy = Callable[..., CheckpointPolicy]
Drawn = dict[tuple[Any, int], Callable[[], None]]


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy | Sequence[Any], allow_cache_entry_mutation: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make the two contexts of a region that keeps what some ops returned. For ``context_fn``, through ``functools.partial``.

    Args:
        policy_fn_or_list: the op overloads whose results are kept; or a function that gets a ``SelectiveCheckpointContext``, the
            op and its arguments, and returns a ``CheckpointPolicy`` (``True`` is ``MUST_SAVE``, ``False`` is ``PREFER_RECOMPUTE``).
        allow_cache_entry_mutation: do not refuse kept results that were changed in place.

    Returns:
        The context of the forward and that of the replay.

    Raises:
        ValueError: an entry of the list is no op overload.
        TypeError: neither a list nor a function; or, in the forward, a policy that returned no decision.
    """
    checked = _checked(policy_fn_or_list) if callable(policy_fn_or_list) else policy_fn_or_list
    caching, cached = torch_contexts(checked, allow_cache_entry_mutation)  # type: ignore[no-untyped-call]
    drawn: Drawn = {}
    asked = getattr(cached, "policy_fn", None)  # torch 2.11 asks the policy again in the replay
    return _Caching(caching.policy_fn, caching.storage, drawn), _Cached(asked, cached.storage, allow_cache_entry_mutation, drawn)


def _checked(policy: Policy) -> Policy:
    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        decision: Any = policy(context, op, *args, **kwargs)
        if not isinstance(decision, (CheckpointPolicy, bool)):
            raise TypeError(
                f"a policy must return a CheckpointPolicy or a bool, but for {op} it returned {decision!r}; "
                "return CheckpointPolicy.PREFER_RECOMPUTE for ops that need not be kept"
            )
        return decision  # type: ignore[return-value]  # PyTorch reads a bool as MUST_SAVE or PREFER_RECOMPUTE

    return decide


def _restorer(result: Any) -> Callable[[], None]:
    """Puts the generator that an op drew from back to where the op left it."""
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    device = next((t.device for t in tensors if isinstance(t, torch.Tensor)), torch.device("cpu"))
    if device.type == "cpu":
        state = torch.get_rng_state()
        return lambda: torch.set_rng_state(state)
    module = torch.get_device_module(device)
    state = module.get_rng_state(device)
    return lambda: module.set_rng_state(state, device)


class _Counted:
    """Numbers the calls of each random op in one run of the region."""

    def __enter__(self) -> Any:
        self._calls: dict[Any, int] = defaultdict(int)
        return super().__enter__()  # type: ignore[misc]  # of the mode that this is mixed into

    def _number(self, op: Any) -> int | None:
        """Of the call that comes now; ``None`` for an op that does not draw."""
        if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
            return None
        self._calls[op] += 1
        return self._calls[op]


class _Caching(_Counted, CachingMode):  # type: ignore[misc]  # a private class of torch has no type
    """The forward's mode. It remembers where each random op left its generator."""

    def __init__(self, policy: Any, storage: Any, drawn: Drawn) -> None:
        super().__init__(policy, storage)
        self.drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self._number(func)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if number is not None:
            self.drawn[func, number] = _restorer(result)
        return result


class _Cached(_Counted, CachedMode):  # type: ignore[misc]
    """The replay's mode. A kept result does not draw, so the generator is moved to where the op had left it."""

    def __init__(self, policy: Any, storage: Any, allow_cache_entry_mutation: bool, drawn: Drawn) -> None:
        super().__init__(policy, storage, allow_cache_entry_mutation)
        self.drawn = drawn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = self._number(func)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        move = None if number is None else self.drawn.get((func, number))
        if move is not None:
            move()
        return result
