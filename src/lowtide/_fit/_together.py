"""The processes of a fit: what one of them decides all of them have to do, and where one fails all of them stop with its error.

Every question that processes put to each other goes through ``gather``. A process that fails answers the next one with its error in place
of a value, so that the others learn of it there; those that wait for it in a collective of the step give up after a time, and ask then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from lowtide.distributed import measure_gather
from lowtide.errors import InvalidInputError, StepError
from lowtide.records import StepTrace
from lowtide.verify import Ranks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Said:
    """What a process answers.

    Attributes:
        stage: what it runs the plan of.
        value: the answer.
        error: why there is none.
        at_s: when it failed, by the clock of its machine.
    """

    stage: Hashable
    value: Any = None
    error: str = ""
    at_s: float = 0.0


class Together:
    """The processes of the default group; just this one where there is no group.

    Args:
        stage: processes with the same one install the same plan.
        timeout_s: how long a collective of the step may wait for other processes.
    """

    def __init__(self, stage: Hashable = None, timeout_s: float = 60.0) -> None:
        self._ranks, self._stage = Ranks(timeout_s), stage
        self._told = False

    @property
    def several(self) -> bool:
        """Whether there is more than this process."""
        return self._ranks.count > 1

    def run(self, work: Callable[[], T]) -> T:
        """Do something in the course of which processes ask each other: an error in one ends it in all.

        Raises:
            StepError: another process failed; it says which, and how.
            Exception: whatever this one raises.
        """
        with self._ranks.bounded():
            try:
                return work()
            except BaseException as error:
                if self.several and not self._told:
                    self._tell(error)
                raise

    def gather(self, value: T) -> list[tuple[Hashable, T]]:
        """Stage and answer of each process, by rank.

        Raises:
            StepError: one of them failed.
        """
        found = self._ranks.gather(_Said(self._stage, value))
        self._raise_if_failed(found)
        return [(said.stage, said.value) for said in found]

    def refuse_different(self, options: dict[str, object]) -> None:
        """Processes that are asked for different things would wait for each other in vain.

        Raises:
            InvalidInputError: they were; it says what.
            StepError: one of them failed.
        """
        asked = [found for _, found in self.gather(options)]
        for rank, found in enumerate(asked):
            name = next((name for name in options if found[name] != asked[0][name]), None)
            if name is not None:
                self._told = True  # all of them find it
                raise InvalidInputError(
                    "all processes have to be asked for the same fit: "
                    f"rank 0 was given {name}={asked[0][name]!r}, rank {rank} {name}={found[name]!r}"
                )

    def of_stage(self, value: T) -> list[T]:
        """The answers of the processes with the same plan, by rank."""
        return [found for stage, found in self.gather(value) if stage == self._stage]

    def stages(self) -> int:
        """How many plans there are."""
        return len({stage for stage, _ in self.gather(None)})

    def any(self, here: bool) -> bool:
        """Whether something holds in any process."""
        return any(found for _, found in self.gather(here))

    def from_leader(self, weight: int, make: Callable[[], T]) -> T:
        """What the process of the stage with the greatest weight makes; of equal ones the first."""
        weights = self.of_stage((weight, -self._ranks.rank))
        leads = max(weights) == (weight, -self._ranks.rank)
        return next(made[0] for made in self.of_stage([make()] if leads else []) if made)

    def priced(self, trace: StepTrace, device: torch.device) -> StepTrace:
        """A trace in which it takes as long to gather parameters as it does between these processes, measured; the same on all of them."""
        if not self.any(any(gather.is_extra for gather in trace.gathers)):
            return trace
        cost = measure_gather(device=device)
        sizes = [sum(trace.storages[storage].bytes for storage in gather.storages) for gather in trace.gathers]
        gathers = (replace(gather, seconds=cost.seconds(size)) for gather, size in zip(trace.gathers, sizes, strict=True))
        return replace(trace, gathers=tuple(gathers))

    def _tell(self, error: BaseException) -> None:
        """Let the others know.

        Raises:
            StepError: another process failed before.
        """
        said = _Said(self._stage, error=f"{type(error).__name__}: {error}", at_s=time.time())
        try:
            found = self._ranks.gather(said)
        except RuntimeError:
            return  # they did not answer in time: what is known here is all there is
        first = min((other for other in found if other.error), key=lambda other: other.at_s)
        if first is not found[self._ranks.rank]:
            raise self._failure(found) from error

    def _raise_if_failed(self, found: list[_Said]) -> None:
        if any(said.error for said in found):
            self._told = True
            raise self._failure(found)

    @staticmethod
    def _failure(found: list[_Said]) -> StepError:
        rank, said = min(((rank, said) for rank, said in enumerate(found) if said.error), key=lambda entry: entry[1].at_s)
        return StepError(f"rank {rank} stopped, and all others with it: {said.error}")
