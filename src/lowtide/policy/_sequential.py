"""``checkpoint_sequential``: callables that run one after the other, replayed in segments of equal cost.

A step holds what passes between segments, and besides what one segment saves while it is replayed: the largest decides. So the cost of
a callable is the bytes that autograd saves in it (its parameters apart, each storage once), and the segments are those whose largest
is smallest. Time is no cost here: however a sequence is split, each callable is replayed once. The first call finds the bytes out,
with each callable as a region of its own: no split needs less memory at once, but for what passes between the callables.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide import _torch_private as private
from lowtide.engine import in_replay, register_state
from lowtide.errors import InvalidInputError
from lowtide.policy._checkpoint import checkpoint

_Part = Callable[..., Any]
Runs = tuple[tuple[int, int], ...]


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[_Part],
    *,
    segments: int | None = None,
    costs: Sequence[float] | None = None,
    replay_last: bool = True,
) -> SequentialRegions:
    """Make one callable of several that run one after the other, replayed in segments.

    Unlike PyTorch's function of this name (which is ``lowtide.torch_compat.checkpoint_sequential``), segments are balanced by cost and not
    by count, and inputs and outputs may be anything.

    Args:
        functions: modules or any other callables; each is given what the one before returned.
        segments: how many at most; by default the square root of the number of callables (Chen et al. 2016, arXiv:1604.06174). Where
            fewer do not make the largest one larger, there are fewer.
        costs: of each callable, in any unit. Without them, the bytes that each saves are measured in the first call with gradients.
        replay_last: whether the last segment is replayed too. Backward begins with it, so that only saves memory where what follows the
            sequence, such as a loss over a large vocabulary, needs some while the segment would hold its own.

    Returns:
        A callable that takes the arguments of the first callable, keywords too, and returns what the last one returns.

    Raises:
        InvalidInputError: there is nothing to call, or numbers that make no sense.

    >>> layers = [nn.Linear(4, 4) for _ in range(9)]
    >>> run = checkpoint_sequential(layers, segments=3, costs=[4, 1, 1, 1, 1, 1, 1, 1, 1])
    >>> run(torch.ones(2, 4)).shape, run.segments()
    (torch.Size([2, 4]), ((0, 1), (1, 5), (5, 9)))
    """
    parts: list[_Part] = [*functions]  # in the closure of what is returned, where a region around it finds the modules among them
    if not parts or not all(map(callable, parts)):
        raise InvalidInputError("checkpoint_sequential needs modules or functions to run one after the other: pass a list of them")
    if segments is not None and segments < 1:
        raise InvalidInputError(f"checkpoint_sequential needs at least one segment, not {segments}")
    if costs is not None and (len(costs) != len(parts) or not all(cost >= 0 and math.isfinite(cost) for cost in costs)):
        raise InvalidInputError(f"costs must be {len(parts)} numbers that are not negative, one for each callable, but are {list(costs)}")
    count = segments or round(math.sqrt(len(parts)))
    state = _State(count, None if costs is None else split(costs, count), replay_last)

    def run(*args: Any, **kwargs: Any) -> Any:
        return state.call(parts, args, kwargs)

    run.segments = lambda: state.runs  # type: ignore[attr-defined]
    return cast("SequentialRegions", run)


def split(costs: Sequence[float], segments: int) -> Runs:
    """Split a sequence into at most so many runs, the dearest of which is as cheap as can be.

    The bound on the cost of a run is found by bisection: for each, filling runs from the left shows whether there are few enough.

    >>> split([1, 1, 1, 3], 2)
    ((0, 3), (3, 4))
    """
    low, high = float(max(costs)), float(sum(costs))
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(_fill(costs, middle)) <= segments else (middle, high)
    return _fill(costs, high)


def _fill(costs: Sequence[float], bound: float) -> Runs:
    runs, start, total = [], 0, 0.0
    for index, cost in enumerate(costs):
        total += cost
        if total > bound * (1 + 1e-12) and index > start:
            runs.append((start, index))
            start, total = index, float(cost)
    return (*runs, (start, len(costs)))


class SequentialRegions(Protocol):
    """What ``checkpoint_sequential`` returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all of them."""

    def segments(self) -> tuple[tuple[int, int], ...] | None:
        """First callable and the one after the last of each segment; ``None`` as long as that is not known."""


class _State:
    """The segments, once they are known, and until then a region for each callable."""

    def __init__(self, count: int, runs: Runs | None, replay_last: bool) -> None:
        self.count, self.runs, self.replay_last = count, runs, replay_last
        self.single: list[_Measured] | None = None
        self.regions: dict[tuple[int, int], _Part] = {}

    def call(self, parts: list[_Part], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return _run(parts, *args, **kwargs)
        if self.runs is None:
            return self._call_measured(parts, args, kwargs)
        return _run([self._region(parts, run) for run in self.runs], *args, **kwargs)

    def _region(self, parts: list[_Part], run: tuple[int, int]) -> _Part:
        if run not in self.regions:
            segment = _chain(parts[slice(*run)])
            replayed = self.replay_last or run[1] < len(parts)
            self.regions[run] = checkpoint(segment, name=f"segment {run[0]}:{run[1]}") if replayed else segment
        return self.regions[run]

    def _call_measured(self, parts: list[_Part], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.single is None:
            self.single = [_Measured(part) for part in parts]
        single = self.single
        result = _run([part.region for part in single], *args, **kwargs)
        costs = [part.saved_bytes for part in single]
        if not in_replay() and any(costs):  # what is replayed has to go on as its forward did
            self.runs, self.single = split(costs, self.count), None
        return result


def _restore(state: _State, then: tuple[Any, Any]) -> None:
    state.runs, state.single = then


# A region around it is replayed in the segments that its forward ran in, also if those were found in that very call.
register_state(_State, lambda state: (state.runs, state.single), _restore)


class _Measured:
    """One callable as a region, with the bytes that autograd saved in its first call."""

    def __init__(self, part: _Part) -> None:
        self.saved_bytes = 0
        note = self._note

        def measured(*args: Any, **kwargs: Any) -> Any:
            hooks = private.top_hooks()
            if hooks is None or in_replay():
                return part(*args, **kwargs)
            with saved_tensors_hooks(note(hooks[0]), hooks[1]):
                return part(*args, **kwargs)

        self.region = checkpoint(measured, name=getattr(part, "__qualname__", type(part).__qualname__))

    def _note(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """The pack hook of the region, with notes taken. Weak references to storages keep their numbers from being given out again."""
        seen: dict[int, StorageWeakRef] = {}
        self.saved_bytes = 0

        def note_and_pack(tensor: torch.Tensor) -> Any:
            root = tensor if tensor.is_leaf else tensor._base
            if root is None or not (root.is_leaf and root.requires_grad):
                storage = tensor.untyped_storage()
                known = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                if known.cdata not in seen:
                    seen[known.cdata] = known
                    self.saved_bytes += storage.nbytes()
            return pack(tensor)

        return note_and_pack


def _chain(parts: Sequence[_Part]) -> _Part:
    """One callable: a module where all of them are, so that the engine knows it for what it is."""
    if len(parts) == 1:
        return parts[0]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    return _Chain(modules) if len(modules) == len(parts) else functools.partial(_run, list(parts))


def _run(parts: Sequence[_Part], /, *args: Any, **kwargs: Any) -> Any:
    value = parts[0](*args, **kwargs)
    for part in parts[1:]:
        value = part(value)
    return value


class _Chain(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _run([*self.parts], *args, **kwargs)
