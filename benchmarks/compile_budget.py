"""Byte budgets of compiled models against PyTorch's own knob: time of a step at equal measured peak.

The knob is ``torch._functorch.config.activation_memory_budget``, a share of the bytes that a compiled forward would save. Its sweep
gives measured peaks; those that no other point of the sweep beats in both time and peak are the budgets that lowtide is given, in bytes.
For each, ``lowtide.fit_compiled`` compiles and measures until it is within the budget. Then the un-compiled un-checkpointed step, that
point of the sweep and lowtide take turns in one process. Peaks are counted by the allocator's events, beyond what is there before the step,
as a share of those of the un-compiled step; times are CPU times on one thread over that step's, medians of pairs.

    python benchmarks/compile_budget.py [--rounds 9] [--budgets 4] [--knob 1 0.8 …] [--ways whole blocks] [MODEL ...]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch._dynamo.config
import torch._functorch.config
from planner import CPU, STEADY, SUBJECTS, Subject
from torch import nn

import lowtide
from lowtide.measure import live_storages, peak_bytes

KNOB = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
GOAL = {"cnn": 0.8, "unet": 0.8}
"""Of the knob's overhead over the step that is not compiled."""


@dataclass(frozen=True)
class Point:
    """A setting of the knob: its measured peak, and a first look at its time over the un-compiled step."""

    knob: float
    peak_bytes: int
    over: float


@dataclass
class Bench:
    """One model, compiled whole or block by block."""

    subject: Subject
    whole: bool
    rounds: int
    budgets: int
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts: list[nn.Module] = [self.subject.model] if self.whole else self.subject.blocks
        self.options = lowtide.compile_options("100%")
        self.resident = sum(live_storages(self.subject.model, CPU).values())
        self.plain_bytes = self.peak()

    def peak(self) -> int:
        self.subject.step()
        gc.collect()
        return peak_bytes(self.subject.step, CPU, self.resident)

    def share(self, size: int) -> float:
        return (size - self.resident) / (self.plain_bytes - self.resident)

    def sweep(self, knob: list[float]) -> None:
        for setting in knob:
            torch._dynamo.reset()
            ours = self.by_knob(setting)
            peak = self.peak()
            [over] = self.over([ours], rounds=3)
            self.points.append(Point(setting, peak, over))
            self.use(None)

    def frontier(self) -> list[Point]:
        """From the largest peak down, no more than there are to be budgets, the ends among them."""
        found = [
            point
            for point in sorted(self.points, key=lambda p: -p.peak_bytes)
            if not any(p.peak_bytes <= point.peak_bytes and p.over < point.over for p in self.points)
        ]
        places = {round(k * (len(found) - 1) / max(self.budgets - 1, 1)) for k in range(self.budgets)}
        return [point for k, point in enumerate(found) if k in places]

    def by_knob(self, setting: float) -> list[Callable[..., object]]:
        with torch._functorch.config.patch(activation_memory_budget=setting):
            return self.compiled(isolate_recompiles=True)

    def compiled(self, **options: object) -> list[Callable[..., object]]:
        for part in self.parts:
            part.compile(**options)
        self.subject.step()
        self.subject.step()
        return [part._compiled_call_impl for part in self.parts]

    def use(self, calls: list[Callable[..., object]] | None) -> None:
        for part, call in zip(self.parts, calls or [None] * len(self.parts), strict=True):
            part._compiled_call_impl = call

    def over(self, sides: list[list[Callable[..., object]]], rounds: int) -> list[float]:
        """CPU time of each side over the un-compiled step."""
        times: list[list[float]] = [[] for _ in (None, *sides)]
        for round_ in range(rounds + 1):
            for side, seconds in zip([None, *sides], times, strict=True):
                self.use(side)
                gc.collect()
                began = time.process_time()
                self.subject.step()
                if round_:
                    seconds.append(time.process_time() - began)
        plain, *others = times
        return [statistics.median(s / p for s, p in zip(other, plain, strict=True)) for other in others]

    def rows(self, name: str) -> Iterator[str]:
        last = None
        for point in self.frontier():
            budget = f"{self.share(point.peak_bytes):.3f}"
            self.use(None)
            ours = self.compiled_within(point.peak_bytes)
            if isinstance(ours, str):
                yield f"{budget}  {ours}"
                continue
            peak, difference, fitted_s = ours
            sides = [self.by_knob(point.knob), self.calls]
            self.use(self.calls)
            again = self.peak()
            knob, fitted = self.over(sides, self.rounds)
            said = verdict(name, peak=max(peak, again), budget=point.peak_bytes, last=last, knob=knob, fitted=fitted)
            last = again
            peaks = f"{self.share(point.peak_bytes):6.3f} {knob:6.3f}    {self.share(again):6.3f} {fitted:6.3f}"
            yield f"{budget}  {point.knob:4.2f} {peaks}   {difference:9.1e} {fitted_s:6.0f} s  {said}"

    def compiled_within(self, budget_bytes: int) -> tuple[int, float, float] | str:
        """Fit; what was measured, the difference in gradients, and the seconds that it took."""
        for part in self.parts:
            part.compile(options=self.options) if not hasattr(self, "calls") else None
        if hasattr(self, "calls"):
            self.use(self.calls)
        began = time.monotonic()
        try:
            result = lowtide.fit_compiled(self.subject.model, self.subject.step, self.options, budget_bytes)
        except lowtide.InfeasibleBudgetError as error:
            return f"lowtide: none fits below {self.share(error.smallest_bytes):.3f}"
        self.calls = [part._compiled_call_impl for part in self.parts]
        return result.peak_bytes, result.difference, time.monotonic() - began


def verdict(name: str, *, peak: int, budget: int, last: int | None, knob: float, fitted: float) -> str:
    """What of the goals is met: peak within the budget and monotonic, time at most the knob's, and its overhead a share of the knob's."""
    said = ["within" if peak <= budget else "OVER BUDGET", "monotonic" if last is None or peak <= last else "NOT MONOTONIC"]
    said.append(f"time {fitted / knob:.3f} of the knob's" + ("" if fitted <= knob else " SLOWER"))
    if name in GOAL and knob > 1:
        share = (fitted - 1) / (knob - 1)
        said.append(f"overhead {share:.2f} of the knob's" + ("" if share <= GOAL[name] else f" (goal {GOAL[name]})"))
    return ", ".join(said)


def show(name: str, whole: bool, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    bench = Bench(SUBJECTS[name](), whole, arguments.rounds, arguments.budgets)
    bench.sweep(arguments.knob)
    print(f"{name}, compiled {'whole' if whole else 'block by block'}: peak and time over un-compiled un-checkpointed")
    print("  sweep of the knob: " + "  ".join(f"{p.knob:g}: {bench.share(p.peak_bytes):.3f}/{p.over:.3f}" for p in bench.points))
    print("  budget  knob   peak   time  lowtide peak   time   gradients  found in", flush=True)
    for row in bench.rows(name):
        print(f"  {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budgets", type=int, default=4, help="at most so many for each")
    parser.add_argument("--knob", type=float, nargs="*", default=KNOB)
    parser.add_argument("--ways", nargs="*", default=["whole", "blocks"])
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in STEADY.items()):  # read when the process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY, "TORCH_CPP_LOG_LEVEL": "ERROR"})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    for name in arguments.models:
        for way in arguments.ways:
            show(name, way == "whole", arguments)


if __name__ == "__main__":
    main()
