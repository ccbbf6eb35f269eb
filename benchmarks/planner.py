"""The planner against what people use: time of a step at equal peak, all sides taken in turns in one process.

A budget of 40 % allows 40 % of the bytes that the un-checkpointed step has alive at its peak beyond what is there before it
(parameters, gradients, data). Peaks are counted by the allocator's events, which know nothing of traces and plans. ``time`` is CPU
time over that of the un-checkpointed step, the median of pairs: on one thread it is what a step takes, but for what other programs
take of the machine. The peers:

* ``first k``: PyTorch's non-reentrant checkpointing on the first k blocks, with the smallest k whose measured peak is within the budget,
  and on one block less.
* ``selective``: PyTorch's on every block with all matrix products kept.
* ``AutoSAC``: PyTorch's program over modules (``_planner_autosac``), with the largest of a few budgets told to it whose measured peak
  is within. It needs pulp and pwlf: ``pip install pulp pwlf``; without them it is left out, and that is said.

Rockmate is not among them: it needs rkgb, whose published versions lack their own package ``rkgb.core``, so that it cannot be imported.

A verdict compares overheads at the same measured peak: on the straight line between the two measured points of a peer around it. The
model ``llama`` needs transformers: ``pip install 'lowtide[transformers]'``.

    python benchmarks/planner.py [--rounds 9] [--budgets 25 40 50 60 75] [MODEL ...]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
from _planner_autosac import AutoSAC, by_torch
from _planner_models import SUBJECTS, Subject
from _planner_verdict import Point, verdicts
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import lowtide
from lowtide.measure import peak_bytes
from lowtide.plan import smallest_budget

# Page faults of the C library's allocator are a large part of a step on the CPU, and differ from run to run.
STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456", "MALLOC_ARENA_MAX": "1"}
CPU = torch.device("cpu")
MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.convolution.default}
TOLD = (1.0, 0.97, 0.94, 0.9, 0.85)
"""Of the budget, what AutoSAC is told of in turn until its measured peak is within."""
Way = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Side:
    """A way to run the step.

    Attributes:
        family: of sides that are one way to trade memory for time.
        name: for the table.
        active: a context in which the step is run that way; entering and leaving it is not timed.
        peak_bytes: measured.
        note: what it chose.
        predicted: peak and time over un-checkpointed, where it predicts them.
    """

    family: str
    name: str
    active: Way
    peak_bytes: int
    note: str = ""
    predicted: tuple[float, float] | None = None


def keep_matmuls(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def selective(blocks: list[nn.Module]) -> AbstractContextManager[None]:
    return by_torch(blocks, context_fn=partial(create_selective_checkpoint_contexts, keep_matmuls))


class Bench:
    """One model: what is measured once, and the sides of a budget."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.trace = lowtide.trace(subject.model, subject.step)
        self.resident = sum(storage.bytes for storage in self.trace.storages if storage.resident)
        self.before = lowtide.simulate(self.trace, None)
        self.plain_bytes = self._peak(nullcontext)
        self.autosac = self._autosac()
        way = partial(selective, subject.blocks)
        self.selective = Side("selective", "selective", way, self._peak(way))

    def _autosac(self) -> AutoSAC | None:
        try:
            return AutoSAC(self.subject.model, self.subject.step)
        except ImportError as error:
            print(f"AutoSAC is left out, for it needs pulp and pwlf (pip install pulp pwlf): {error}")
        except Exception as error:  # it reads few kinds of models
            print(f"AutoSAC is left out, for it cannot read this model: {type(error).__name__} {error}")
        return None

    @cache  # noqa: B019
    def first(self, k: int) -> Side:
        way = partial(by_torch, self.subject.blocks[:k])
        return Side("first k", f"first {k}", way, self._peak(way))

    def peers(self, budget_bytes: int) -> list[Side]:
        """The fewest first blocks that fit, for the peak falls with their number, and one less; AutoSAC's choice; selective."""
        blocks = len(self.subject.blocks)
        k = bisect_left(range(1, blocks + 1), True, key=lambda k: self.first(k).peak_bytes <= budget_bytes) + 1
        found = [self.first(i) for i in (k, k - 1) if i > 0 and k <= blocks]
        found += self._by_autosac(budget_bytes)
        return found + ([self.selective] if self.selective.peak_bytes <= budget_bytes else [])

    def _by_autosac(self, budget_bytes: int) -> list[Side]:
        for told in TOLD if self.autosac is not None else ():
            share = told * (budget_bytes - self.resident) / (self.plain_bytes - self.resident)
            choice = self.autosac.choice(self.resident + share * (self.autosac.plain_bytes - self.resident))
            if not choice:
                return []
            way = partial(self.autosac.active, choice)
            try:
                peak = self._peak(way)
            except RuntimeError as error:  # selective checkpointing refuses what it chose
                print(f"AutoSAC is left out here, for its choice fails: {error}")
                return []
            if peak <= budget_bytes:
                return [Side("AutoSAC", "AutoSAC", way, peak, f"{len(choice)} modules, {sum(map(sum, choice.values()))} ops kept")]
        return []

    def _peak(self, active: Way) -> int:
        with active():
            self.subject.step()
            self.subject.step()
            gc.collect()
            return peak_bytes(self.subject.step, CPU, self.resident)

    def share(self, size: int) -> float:
        """Of the bytes that the un-checkpointed step has alive at its peak beyond what was there before."""
        return (size - self.resident) / (self.plain_bytes - self.resident)

    def within(self, percent: int, rounds: int, time_limit_s: float) -> list[tuple[Side, float]]:
        """The sides of a budget, ours first where there is a plan, each with its time over un-checkpointed."""
        budget = self.resident + (self.plain_bytes - self.resident) * percent // 100
        peers = self.peers(budget)
        began = time.monotonic()
        try:
            plan = lowtide.solve(self.trace, budget, time_limit_s=time_limit_s)
        except lowtide.InfeasibleBudgetError as error:
            print(f"{percent:>5} %  lowtide: none fits below {self.share(error.smallest_bytes):.3f}")
            return self._timed(peers, nullcontext, rounds)
        return self._beside(plan, time.monotonic() - began, peers, rounds)

    def leanest(self, rounds: int) -> list[tuple[Side, float]]:
        """The plan of the smallest peak beside the replay of every block."""
        began = time.monotonic()
        return self._beside(smallest_budget(self.trace), time.monotonic() - began, [self.first(len(self.subject.blocks))], rounds)

    def _beside(self, plan: lowtide.Plan, planned_s: float, peers: list[Side], rounds: int) -> list[tuple[Side, float]]:
        handle = lowtide.apply(self.subject.model, plan)
        try:
            peak = self._peak(nullcontext)
            ours = Side("lowtide", "lowtide", nullcontext, peak, self._note(plan, planned_s), self._predicted(plan))
            return self._timed([ours, *peers], handle.disabled, rounds)
        finally:
            handle.remove()

    def _note(self, plan: lowtide.Plan, planned_s: float) -> str:
        kept, nested = sum(len(region.kept) for region in plan.regions), sum(bool(region.inside) for region in plan.regions)
        gap = "?" if plan.gap is None else f"{plan.gap:.1%}"
        return f"{len(plan.regions)} regions, {nested} with others inside, {kept} calls kept; gap {gap}, planned in {planned_s:.1f} s"

    def _predicted(self, plan: lowtide.Plan) -> tuple[float, float]:
        return self.share(plan.predicted_peak_bytes), plan.predicted_step_s / self.before.step_s

    def _timed(self, sides: list[Side], without: Way, rounds: int) -> list[tuple[Side, float]]:
        plain, *times = self._times([Side("", "", nullcontext, 0), *sides], without, rounds)
        overs = (statistics.median(s / p for s, p in zip(spent, plain, strict=True)) for spent in times)
        return list(zip(sides, overs, strict=True))

    def _times(self, sides: list[Side], without: Way, rounds: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in sides]
        for round_ in range(rounds + 1):
            for side, seconds in zip(sides, times, strict=True):
                with nullcontext() if side.family == "lowtide" else without(), side.active():
                    gc.collect()
                    began = time.process_time()
                    self.subject.step()
                    spent = time.process_time() - began
                if round_:
                    seconds.append(spent)
        return times


def show(name: str, arguments: argparse.Namespace) -> None:
    print(f"{name}: peak and time over un-checkpointed")
    bench = Bench(SUBJECTS[name]())
    print(f"{'budget':>7}  {'side':<11} {'peak':>6} {'time':>6}  {'predicted':<11}  what", flush=True)
    points: list[Point] = []
    for percent in arguments.budgets:
        for side, over in bench.within(percent, arguments.rounds, arguments.time_limit):
            print_row(f"{percent} %", bench, side, over)
            points.append(Point(side.family, percent, bench.share(side.peak_bytes), over, *(side.predicted or ())))
    lowest, every = bench.leanest(max(arguments.rounds // 3, 1))
    print_row("lowest", bench, *lowest)
    print_row("lowest", bench, *every)
    print("\n".join(verdicts(name, points)))
    ratio = bench.share(lowest[0].peak_bytes) / bench.share(every[0].peak_bytes)
    print(f"  lowest peak over that of every block: {ratio:.3f} (goal of cnn and unet 0.85)\n", flush=True)


def print_row(budget: str, bench: Bench, side: Side, over: float) -> None:
    predicted = "" if side.predicted is None else "{:.3f} {:.3f}".format(*side.predicted)
    print(f"{budget:>7}  {side.name:<11} {bench.share(side.peak_bytes):>6.3f} {over:>6.3f}  {predicted:<11}  {side.note}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budgets", type=int, nargs="*", default=[25, 40, 50, 60, 75])
    parser.add_argument("--time-limit", type=float, default=20.0)
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in STEADY.items()):  # read when the process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY, "TORCH_CPP_LOG_LEVEL": "ERROR"})
    torch.set_num_threads(1)
    for name in arguments.models:
        torch.manual_seed(0)
        show(name, arguments)


if __name__ == "__main__":
    main()
