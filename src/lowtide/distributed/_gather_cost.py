"""What it takes to gather parameters from other processes: a latency, and bytes over bandwidth, as measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowtide.errors import InvalidInputError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_SMALL, _LARGE = 2**10, 2**23
"""Bytes of a rank's share in the two gathers that are timed."""


@dataclass(frozen=True, slots=True)
class GatherCost:
    """Time of an all-gather.

    Attributes:
        latency_s: of one that gathers next to nothing.
        s_per_byte: what each byte of the result adds; one over the bandwidth.

    >>> f"{GatherCost.of_bandwidth(50e9, latency_s=20e-6).seconds(5_000_000_000):.5f}"
    '0.10002'
    """

    latency_s: float
    s_per_byte: float

    @staticmethod
    def of_bandwidth(bytes_per_s: float, latency_s: float = 0.0) -> GatherCost:
        """From a figure that is known.

        Args:
            bytes_per_s: bytes of the gathered result in a second.
            latency_s: of a gather of nothing.

        Raises:
            InvalidInputError: the bandwidth is not above zero, or the latency is below.
        """
        if not bytes_per_s > 0 or not latency_s >= 0:
            raise InvalidInputError(f"a bandwidth is above zero and a latency not below; found {bytes_per_s} bytes/s and {latency_s} s")
        return GatherCost(latency_s, 1 / bytes_per_s)

    def seconds(self, size: int) -> float:
        """Of a gather whose result has ``size`` bytes."""
        return self.latency_s + self.s_per_byte * size if size else 0.0


def measure_gather(group: ProcessGroup | None = None, device: torch.device | str = "cpu", rounds: int = 7) -> GatherCost:
    """Time all-gathers of two sizes among the processes of a group, which all call this.

    Of each size the median of ``rounds`` counts, on the process where it is longest: all of them get the same figures.

    Args:
        group: the processes; the default group by default.
        device: where parameters live.
        rounds: how many gathers of each size are timed, after one that is not.
    """
    import torch.distributed as dist

    ranks = dist.get_world_size(group)
    medians = [_median_s(share, ranks, group, device, rounds) for share in (_SMALL, _LARGE)]
    small_s, large_s = _longest(medians, group, device)
    s_per_byte = max(large_s - small_s, 0.0) / (ranks * (_LARGE - _SMALL))
    return GatherCost(max(small_s - s_per_byte * ranks * _SMALL, 0.0), s_per_byte)


def _median_s(share: int, ranks: int, group: Any, device: Any, rounds: int) -> float:
    import torch
    import torch.distributed as dist

    given = torch.zeros(share, dtype=torch.uint8, device=device)
    gathered = torch.empty(ranks * share, dtype=torch.uint8, device=device)

    def gather() -> None:
        dist.all_gather_into_tensor(gathered, given, group=group)
        if given.is_cuda:
            torch.cuda.synchronize(given.device)

    gather()
    return statistics.median(_timed_s(gather, lambda: dist.barrier(group)) for _ in range(rounds))


def _timed_s(run: Callable[[], None], together: Callable[[], object]) -> float:
    together()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _longest(seconds: list[float], group: Any, device: Any) -> list[float]:
    import torch
    import torch.distributed as dist

    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [float(each) for each in found.tolist()]
