"""The first op of each region whose replay makes other values than its forward.

For lowtide's own regions the engine tells, which compares hashes of saved tensors in calls that it watches. For those of
``torch.utils.checkpoint`` every op of forward and replay is logged with a hash of its result, and the logs are compared.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide import _torch_compiler as torch_compiler
from lowtide.engine import Observer, in_replay, observed, watch_again
from lowtide.engine._replay import saved_by
from lowtide.engine._sources import user_line
from lowtide.engine._values import hash_of, same_hash
from lowtide.torch_compat._torch_regions import TorchRegion, torch_regions_seen
from lowtide.verify._result import ReplayDifference

# Memory without values, and what autograd does of its own where hooks are at work.
_NO_VALUES = ("aten.empty", "aten.new_empty", "aten.detach")


@contextmanager
def left_to_the_report() -> Iterator[None]:
    """While in this context, the engine does not warn of replays that differ: that is what is looked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the replay of region")
        yield


class FirstOps(Observer):
    """Collects what differs, region by region.

    Args:
        name_of: what to call a function that ``torch.utils.checkpoint`` is given.
    """

    def __init__(self, name_of: Callable[[Any], str]) -> None:
        self._name_of = name_of
        self._order: dict[str, None] = {}
        self._found: dict[str, ReplayDifference] = {}
        self._logs: dict[int, _Log] = {}

    @property
    def found(self) -> tuple[ReplayDifference, ...]:
        """One for each region that differs, in the order of their forwards."""
        return tuple(self._found[name] for name in self._order if name in self._found)

    def entering(self, region: Any, profile: Any) -> None:
        """Have it watched."""
        if not in_replay():
            self._order.setdefault(region.name)
            watch_again(profile)

    def differs(self, frame: Any, index: int) -> None:
        """The engine found a saved tensor that differs."""
        op, source = saved_by(frame, index)
        self._found.setdefault(frame.region.name, ReplayDifference(frame.region.name, op, source))

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While in this context, every region is watched."""
        with observed(self), torch_regions_seen(self._around):
            yield

    @contextmanager
    def _around(self, region: TorchRegion, replaying: bool) -> Iterator[None]:
        name = self._name_of(region.function)
        self._order.setdefault(name)
        log = self._logs.get(id(region))
        if not replaying:
            log = self._logs[id(region)] = _Log(region)
        if log is None:
            yield
            return
        try:
            with torch_compiler.off(), log.forward if not replaying else log.replay():
                yield
        finally:  # torch ends a replay by an exception
            if log.differing is not None:
                self._found.setdefault(name, ReplayDifference(name, *log.differing))


class _Log:
    """The ops of one call and of its replays.

    Attributes:
        region: whose call it is; held, so that no other takes its place in tables by ``id``.
        forward: logs the forward while it is entered.
        differing: the first op whose replay differs, and its line.
    """

    def __init__(self, region: TorchRegion) -> None:
        self.region = region
        self.forward = _Logging(self._note)
        self.differing: tuple[str, str] | None = None
        self._ops: list[tuple[str, list[Any], str]] = []

    def replay(self) -> TorchDispatchMode:
        """Logs a replay while it is entered."""
        ops = iter(self._ops)

        def check(name: str, hashes: list[Any], source: str) -> None:
            expected = next(ops, None)
            if self.differing is None and expected is not None and not _alike(expected, name, hashes):
                self.differing = expected[0], expected[2] or source

        return _Logging(check)

    def _note(self, name: str, hashes: list[Any], source: str) -> None:
        self._ops.append((name, hashes, source))


def _alike(expected: tuple[str, list[Any], str], name: str, hashes: list[Any]) -> bool:
    return expected[0] == name and len(expected[1]) == len(hashes) and all(map(same_hash, expected[1], hashes))


class _Logging(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells of every op, with hashes of what it made and the user's line."""

    def __init__(self, tell: Callable[[str, list[Any], str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not name.startswith(_NO_VALUES):
            hashes = [hash_of(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._tell(name, hashes, user_line(sys._getframe(1)))
        return result
