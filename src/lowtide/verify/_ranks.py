"""Processes that verify together: what one of them decides, all of them have to do, and none may wait for ever.

A process whose step raised leaves the others waiting in a collective. For the time of a verification, collectives therefore give up
after a time; what each found then goes over a group of its own, which waits longer than they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lowtide import _torch_groups as groups_of_torch

T = TypeVar("T")

_GRACE_S = 30.0


class Ranks:
    """The processes of the default group; just this one where there is no group.

    Args:
        timeout_s: how long a collective may wait for the other processes.
    """

    def __init__(self, timeout_s: float) -> None:
        self._group: Any = None
        self._timeout = timedelta(seconds=timeout_s)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # twice: others may be in the step for as long as a collective of theirs waits
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * timeout_s + _GRACE_S))

    @property
    def rank(self) -> int:
        """The number of this process."""
        return 0 if self._group is None else dist.get_rank()

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self._group is None else dist.get_world_size()

    def gather(self, value: T) -> list[T]:
        """What each process has, by rank.

        Raises:
            RuntimeError: a process did not answer in time.
        """
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._group)
        return found

    def any(self, here: bool) -> bool:
        """Whether something holds in any process."""
        return any(self.gather(here))

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """While in this context, collectives of the step give up after a time."""
        groups = [] if self._group is None else [group for group in groups_of_torch.process_groups() if group is not self._group]
        before = [(group, groups_of_torch.timeout_of(group)) for group in groups]
        known = [(group, timeout) for group, timeout in before if timeout is not None]
        for group, timeout in known:
            groups_of_torch.set_timeout(group, min(timeout, self._timeout))
        try:
            yield
        finally:
            for group, timeout in known:
                groups_of_torch.set_timeout(group, timeout)
            if self._group is not None:
                dist.destroy_process_group(self._group)
