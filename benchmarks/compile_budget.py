"""Byte budgets of compiled models against PyTorch's own knob: time of a step at equal measured peak.

The knob is ``torch._functorch.config.activation_memory_budget``, a share of the bytes that a compiled forward would save. Its sweep
gives measured peaks; those that no other point of the sweep beats in both time and peak are the budgets that lowtide is given, in bytes.
For each, ``lowtide.fit_compiled`` compiles, measures and times ways within the budget. Then the un-compiled un-checkpointed step, that
point of the sweep and lowtide take turns in one process. Peaks are counted by the allocator's events, beyond what is there before the step,
as a share of those of the un-compiled step; times are CPU times on one thread over that step's, medians of pairs, and the last column
has quartiles of lowtide's time over the knob's. Further budgets are shares of the least peak that the knob was measured at.

Blocks of several shapes share code, which PyTorch compiles for symbolic sizes from the second shape on; lowtide compiles shapes as they
are. So that it is not this that is compared, block by block the knob is timed a second time with shapes as they are (``static``).

    python benchmarks/compile_budget.py [--rounds 11] [--budgets 4] [--below 0.9 0.8] [--knob 1 0.8 …] [--ways whole blocks] [MODEL ...]
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
    below: list[float]
    points: list[Point] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts: list[nn.Module] = [self.subject.model] if self.whole else self.subject.blocks
        self.options = lowtide.compile_options("100%")
        self.began = time.monotonic()
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
            plain, timed = self.times([ours], rounds=5)
            self.points.append(Point(setting, peak, ratios(timed, plain)[1]))
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

    def by_knob(self, setting: float, static: bool = False) -> list[Callable[..., object]]:
        dynamic = torch._dynamo.config.patch(automatic_dynamic_shapes=not static)
        with torch._functorch.config.patch(activation_memory_budget=setting), dynamic:
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

    def times(self, sides: list[list[Callable[..., object]]], rounds: int) -> list[list[float]]:
        """CPU times of the un-compiled step and of each side, round by round."""
        times: list[list[float]] = [[] for _ in (None, *sides)]
        for round_ in range(rounds + 1):
            for side, seconds in zip([None, *sides], times, strict=True):
                self.use(side)
                gc.collect()
                began = time.process_time()
                self.subject.step()
                if round_:
                    seconds.append(time.process_time() - began)
        return times

    def rows(self, name: str) -> Iterator[str]:
        last, floor = None, min(point.peak_bytes for point in self.points)
        budgets = [(point.peak_bytes, point) for point in self.frontier()]
        budgets += [(self.resident + int(share * (floor - self.resident)), None) for share in self.below]
        for budget_bytes, point in budgets:
            budget = f"{self.share(budget_bytes):.3f}"
            self.use(None)
            ours = self.compiled_within(budget_bytes)
            if isinstance(ours, str):
                yield f"{budget}  {ours}"
                continue
            peak, difference, fitted_s = ours
            theirs = [] if point is None else [self.by_knob(point.knob)] + ([] if self.whole else [self.by_knob(point.knob, static=True)])
            self.use(self.calls)
            again = self.peak()
            plain, fitted, *knobs = self.times([self.calls, *theirs], self.rounds)
            over = [ratios(each, plain)[1] for each in (fitted, *knobs)]
            said = verdict(
                name, peak=max(peak, again), budget=budget_bytes, last=last, over=over, against=[ratios(fitted, k) for k in knobs]
            )
            last = again
            knob = "   –      –   " if point is None else f"{point.knob:4.2f} {self.share(point.peak_bytes):6.3f} {over[1]:6.3f}"
            yield f"{budget}  {knob}    {self.share(again):6.3f} {over[0]:6.3f}   {difference:9.1e} {fitted_s:6.0f} s  {said}"

    def say(self, doing: str) -> None:
        print(f"    {time.monotonic() - self.began:5.0f} s: {doing}", file=sys.stderr, flush=True)

    def compiled_within(self, budget_bytes: int) -> tuple[int, float, float] | str:
        """Fit; what was measured, the difference in gradients, and the seconds that it took."""
        for part in self.parts:
            part.compile(options=self.options) if not hasattr(self, "calls") else None
        if hasattr(self, "calls"):
            self.use(self.calls)
        began = time.monotonic()
        try:
            result = lowtide.fit_compiled(self.subject.model, self.subject.step, self.options, budget_bytes, progress=self.say)
        except lowtide.InfeasibleBudgetError as error:
            return f"lowtide: none fits below {self.share(error.smallest_bytes):.3f}"
        self.calls = [part._compiled_call_impl for part in self.parts]
        return result.peak_bytes, result.difference, time.monotonic() - began


def ratios(times: list[float], others: list[float]) -> list[float]:
    """Quartiles of the ratios pair by pair."""
    return statistics.quantiles([one / other for one, other in zip(times, others, strict=True)], n=4)


def verdict(name: str, *, peak: int, budget: int, last: int | None, over: list[float], against: list[list[float]]) -> str:
    """What of the goals is met: peak within the budget and monotonic, time at most the knob's, and its overhead a share of the knob's."""
    said = ["within" if peak <= budget else "OVER BUDGET", "monotonic" if last is None or peak <= last else "NOT MONOTONIC"]
    for kind, knob, (low, middle, high) in zip(("the knob's", "the static knob's"), over[1:], against, strict=False):
        slower = " SLOWER" if low > 1 else " not told apart" if high > 1 > low else ""
        said.append(f"time {middle:.3f} ({low:.3f} to {high:.3f}) of {kind}{slower}")
        if name in GOAL and knob > 1:
            share = (over[0] - 1) / (knob - 1)
            said.append(f"overhead {share:.2f} of it" + ("" if share <= GOAL[name] else f" (goal {GOAL[name]})"))
    return ", ".join(said)


def show(name: str, whole: bool, arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    bench = Bench(SUBJECTS[name](), whole, arguments.rounds, arguments.budgets, arguments.below)
    bench.sweep(arguments.knob)
    print(f"{name}, compiled {'whole' if whole else 'block by block'}: peak and time over un-compiled un-checkpointed")
    print("  sweep of the knob: " + "  ".join(f"{p.knob:g}: {bench.share(p.peak_bytes):.3f}/{p.over:.3f}" for p in bench.points))
    print("  budget  knob   peak   time  lowtide peak   time   gradients  found in", flush=True)
    for row in bench.rows(name):
        print(f"  {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--budgets", type=int, default=4, help="at most so many for each")
    parser.add_argument("--below", type=float, nargs="*", default=[0.9, 0.8], help="further budgets, of the knob's least peak")
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
