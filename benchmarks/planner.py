"""The planner against what people do by hand: time of a step at equal peak, both sides taken in turns in one process.

A budget of 40 % allows 40 % of the bytes that the un-checkpointed step has alive at its peak beyond what is there before it
(parameters, gradients, data). ``first k`` is PyTorch's non-reentrant checkpointing on the first k blocks, with the smallest k whose
measured peak is within the budget; ``selective`` is PyTorch's on every block with all matrix products kept. Peaks are counted by
the allocator's events, which know nothing of traces and plans. ``time`` is CPU time over that of
the un-checkpointed step, the median of pairs: on one thread it is what a step takes, but for what other programs take of the machine.

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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide.measure import peak_bytes
from lowtide.workloads.gpt import GPT
from lowtide.workloads.resnet import ResNet
from lowtide.workloads.unet import UNet

# Page faults of the C library's allocator are a large part of a step on the CPU, and differ from run to run.
STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456", "MALLOC_ARENA_MAX": "1"}
CPU = torch.device("cpu")
MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.convolution.default}
Step = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """A model, the modules that people would checkpoint, and its step: forward and backward into gradients that are there already."""

    model: nn.Module
    blocks: list[nn.Module]
    step: Step


def subject(model: nn.Module, blocks: list[nn.Module], loss: Callable[[], torch.Tensor]) -> Subject:
    def step() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss().backward()

    step()
    return Subject(model, blocks, step)


def gpt() -> Subject:
    """12 blocks, width 256, 4 sequences of 256."""
    model = GPT(blocks=12, width=256, heads=4, context=256, dropout=0.0)
    x, y = torch.randint(256, (2, 4, 256)).unbind()
    return subject(model, list(model.blocks), lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))


def cnn() -> Subject:
    """Residual blocks with batch norm, uneven in width and resolution."""
    model = ResNet(widths=(24, 48, 96), depths=(2, 4, 3))
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return subject(model, [block for stage in model.stages for block in stage], lambda: F.cross_entropy(model(x), y))


def unet() -> Subject:
    """Long skips: what a level makes on the way down is read on the way up."""
    model = UNet(widths=(24, 48, 72, 128))
    x = torch.randn(32, 3, 32, 32)
    return subject(model, [*model.down, model.bottom, *model.up], lambda: F.mse_loss(model(x), x))


SUBJECTS: dict[str, Callable[[], Subject]] = {"gpt": gpt, "cnn": cnn, "unet": unet}


@dataclass(frozen=True)
class Side:
    """A way to run the step.

    Attributes:
        name: for the table.
        active: a context in which the step is run that way; entering and leaving it is not timed.
        peak_bytes: measured.
        note: what it chose.
        predicted: peak and time over un-checkpointed, where it predicts them.
    """

    name: str
    active: Callable[[], AbstractContextManager[object]]
    peak_bytes: int
    note: str = ""
    predicted: str = ""


@contextmanager
def by_torch(blocks: list[nn.Module], **options: object) -> Iterator[None]:
    before = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.__dict__["forward"] = partial(checkpoint, type(block).forward.__get__(block), use_reentrant=False, **options)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            del block.__dict__["forward"]
            if forward is not None:
                block.__dict__["forward"] = forward


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
        way = partial(selective, subject.blocks)
        self.selective = Side("selective", way, self._peak(way))

    @cache  # noqa: B019
    def first(self, k: int) -> Side:
        way = partial(by_torch, self.subject.blocks[:k])
        return Side(f"first {k}", way, self._peak(way))

    def peers(self, budget_bytes: int) -> list[Side]:
        """The fewest first blocks that fit: the peak falls with their number."""
        k = bisect_left(range(1, len(self.subject.blocks) + 1), True, key=lambda k: self.first(k).peak_bytes <= budget_bytes) + 1
        found = [self.first(k)] if k <= len(self.subject.blocks) else []
        return found + ([self.selective] if self.selective.peak_bytes <= budget_bytes else [])

    def _peak(self, active: Callable[[], AbstractContextManager[object]]) -> int:
        with active():
            self.subject.step()
            self.subject.step()
            gc.collect()
            return peak_bytes(self.subject.step, CPU, self.resident)

    def share(self, size: int) -> float:
        """Of the bytes that the un-checkpointed step has alive at its peak beyond what was there before."""
        return (size - self.resident) / (self.plain_bytes - self.resident)

    def rows(self, percent: int, rounds: int, time_limit_s: float) -> Iterator[list[str]]:
        budget = self.resident + (self.plain_bytes - self.resident) * percent // 100
        peers = self.peers(budget)
        began = time.monotonic()
        try:
            plan = lowtide.solve(self.trace, budget, time_limit_s=time_limit_s)
        except lowtide.InfeasibleBudgetError as error:
            yield [f"{percent} %", "lowtide", f"none fits below {self.share(error.smallest_bytes):.3f}", "", "", ""]
            yield from self._timed(f"{percent} %", peers, nullcontext, rounds)
            return
        planned_s = time.monotonic() - began
        handle = lowtide.apply(self.subject.model, plan)
        try:
            ours = Side("lowtide", nullcontext, self._peak(nullcontext), self._note(plan, planned_s), self._predicted(plan))
            yield from self._timed(f"{percent} %", [ours, *peers], handle.disabled, rounds)
        finally:
            handle.remove()

    def _note(self, plan: lowtide.Plan, planned_s: float) -> str:
        kept = sum(len(region.kept) for region in plan.regions)
        gap = "?" if plan.gap is None else f"{plan.gap:.1%}"
        return f"{len(plan.regions)} regions, {kept} calls kept; gap {gap}, planned in {planned_s:.1f} s"

    def _predicted(self, plan: lowtide.Plan) -> str:
        return f"{self.share(plan.predicted_peak_bytes):.3f} {plan.predicted_step_s / self.before.step_s:.3f}"

    def _timed(
        self, budget: str, sides: list[Side], without: Callable[[], AbstractContextManager[object]], rounds: int
    ) -> Iterator[list[str]]:
        plain, *times = self._times([Side("", nullcontext, 0), *sides], without, rounds)
        for side, spent in zip(sides, times, strict=True):
            over = statistics.median(s / p for s, p in zip(spent, plain, strict=True))
            yield [budget, side.name, f"{self.share(side.peak_bytes):.3f}", f"{over:.3f}", side.predicted, side.note]

    def _times(self, sides: list[Side], without: Callable[[], AbstractContextManager[object]], rounds: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in sides]
        for round_ in range(rounds + 1):
            for side, seconds in zip(sides, times, strict=True):
                with nullcontext() if side.name == "lowtide" else without(), side.active():
                    gc.collect()
                    began = time.process_time()
                    self.subject.step()
                    spent = time.process_time() - began
                if round_:
                    seconds.append(spent)
        return times


def show(name: str, bench: Bench, arguments: argparse.Namespace) -> None:
    print(f"{name}: peak and time over un-checkpointed")
    print(f"{'budget':>7}  {'side':<11} {'peak':>6} {'time':>6}  {'predicted':<11}  what", flush=True)
    for percent in arguments.budgets:
        for budget, side, peak, over, predicted, note in bench.rows(percent, arguments.rounds, arguments.time_limit):
            print(f"{budget:>7}  {side:<11} {peak:>6} {over:>6}  {predicted:<11}  {note}", flush=True)


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
        show(name, Bench(SUBJECTS[name]()), arguments)


if __name__ == "__main__":
    main()
