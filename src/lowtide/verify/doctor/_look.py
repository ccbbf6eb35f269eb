"""One run of the step as it is: which regions ran, how often they were replayed, what was around them, and what it raised."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.engine import Observer, in_replay, observed
from lowtide.engine._sources import is_library
from lowtide.torch_compat._torch_regions import TorchRegion, torch_regions_seen
from lowtide.verify._first_op import left_to_the_report
from lowtide.verify._regions import module_behind, names_for

LOWTIDE, TORCH = "lowtide", "torch.utils.checkpoint"


@dataclass(slots=True)
class RegionRun:
    """One region in one step.

    Attributes:
        name: module path, or name of the function.
        library: whose region it is.
        calls, replays, replay_s: how often it was called and replayed, and the seconds spent in that.
    """

    name: str
    library: str
    calls: int = 0
    replays: int = 0
    replay_s: float = 0.0


@dataclass(slots=True)
class Look:
    """What one run showed.

    Attributes:
        regions: in the order of their first calls.
        torch_calls: every call of ``torch.utils.checkpoint``.
        around: pairs of regions, the outer one first, where one ran directly inside the other.
        flipped: modules that were in another training mode in a replay than in their forward.
        dtypes: default dtypes in forward and replay, where they differ.
        error: what the step raised.
        custom: ``file.py:12`` of the user's own backward that the error came through; empty if it came through none.
        step_s: seconds of the run.
    """

    regions: dict[str, RegionRun] = field(default_factory=dict)
    torch_calls: list[TorchRegion] = field(default_factory=list)
    around: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    flipped: dict[str, None] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, torch.dtype] | None = None
    error: Exception | None = None
    custom: str = ""
    step_s: float = 0.0

    @property
    def checkpoints(self) -> bool:
        """Whether a region ran that has something to replay."""
        return any(run.library == LOWTIDE for run in self.regions.values()) or any(call.recorded for call in self.torch_calls)


def look(model: nn.Module, step: Callable[[], object]) -> Look:
    """Run the step and look on."""
    found = Look()
    watching = _Looking(model, found)
    start = time.perf_counter()
    try:
        with left_to_the_report(), observed(watching), torch_regions_seen(watching.torch_region) as seen:
            step()
    except Exception as error:
        found.error, found.custom = error, _custom_backward(error)
    found.step_s = time.perf_counter() - start
    found.torch_calls = seen
    return found


def _custom_backward(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name == "backward" and not is_library(f.filename)]
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""


class _Looking(Observer):
    """Notes."""

    def __init__(self, model: nn.Module, found: Look) -> None:
        self._model, self._found = model, found
        self._name_of = names_for(model)
        self._stack: list[RegionRun] = []
        self._forward: dict[int, tuple[torch.dtype, dict[str, bool]]] = {}

    def entered(self, frame: Any, call: Any) -> None:
        if not in_replay():
            self._begin(frame.region.name, LOWTIDE)

    def left(self, frame: Any, call: Any) -> None:
        if not in_replay() and self._stack:
            self._stack.pop()

    def replayed(self, frame: Any, seconds: float) -> None:
        run = self._run(frame.region.name, LOWTIDE)
        run.replays += 1
        run.replay_s += seconds

    def torch_region(self, region: TorchRegion, replaying: bool) -> AbstractContextManager[None]:
        """Surrounds each forward and each replay of ``torch.utils.checkpoint``."""
        return self._torch_replay(region) if replaying else self._torch_forward(region)

    @contextmanager
    def _torch_forward(self, region: TorchRegion) -> Iterator[None]:
        self._begin(self._name_of(region.function), TORCH)
        try:
            yield
        finally:
            self._stack.pop()
            self._forward[id(region)] = self._surroundings(region)

    @contextmanager
    def _torch_replay(self, region: TorchRegion) -> Iterator[None]:
        run, start = self._run(self._name_of(region.function), TORCH), time.perf_counter()
        self._compare(self._forward.get(id(region)), self._surroundings(region))
        run.replays += 1
        try:
            yield
        finally:
            run.replay_s += time.perf_counter() - start

    def _surroundings(self, region: TorchRegion) -> tuple[torch.dtype, dict[str, bool]]:
        module = module_behind(region.function)
        inside = {} if module is None else {self._name_of(inner): inner.training for inner in module.modules()}
        return torch.get_default_dtype(), inside

    def _compare(self, then: tuple[torch.dtype, dict[str, bool]] | None, now: tuple[torch.dtype, dict[str, bool]]) -> None:
        if then is None:
            return
        self._found.flipped.update(dict.fromkeys(name for name, training in now[1].items() if then[1].get(name, training) != training))
        if then[0] != now[0]:
            self._found.dtypes = then[0], now[0]

    def _begin(self, name: str, library: str) -> None:
        run = self._run(name, library)
        run.calls += 1
        if self._stack:
            outer = self._stack[-1]
            self._found.around.setdefault((outer.name, name), (outer.library, library))
        self._stack.append(run)

    def _run(self, name: str, library: str) -> RegionRun:
        return self._found.regions.setdefault(f"{library}: {name}", RegionRun(name, library))
