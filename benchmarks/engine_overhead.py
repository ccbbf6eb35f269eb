"""What the engine itself costs a region, beside PyTorch's two forms of checkpointing and torch_remat, all in one run.

Overhead is time minus (two forwards with gradients + one backward): what is left is book-keeping, guards and replays of
nested regions that two forwards do not cover. Every side takes its turn in every round, in an order that rotates, and the
overhead is the median over the rounds of the difference within a round, so a machine that slows down slows both sides.

    python benchmarks/engine_overhead.py                     # all workloads, 60 rounds
    python benchmarks/engine_overhead.py --profile gpt       # where lowtide's time goes in one workload

torch_remat is measured when it is installed (``pip install --no-deps torch_remat==0.2.*``). It does not keep random state,
so its gradients are wrong in a region with dropout; its time is shown all the same.
On a CUDA device the times are of the host: nothing is synchronised within a step, only between steps.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lowtide.engine import checkpoint
from lowtide.engine._acceleration import native

Region = Callable[[Callable[..., Any]], Callable[..., Any]]
Step = Callable[[], torch.Tensor]


class Block(nn.Module):
    """A transformer block of the usual kind: 14 tensors are saved in its forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


@dataclass(frozen=True)
class Workload:
    """Layers to run one after the other; ``depth`` regions are nested around each.

    A gradient goes as soon as it is there, so that the peak is one of activations and not of gradients.
    """

    name: str
    layers: list[nn.Module]
    inputs: torch.Tensor
    depth: int = 1

    def __post_init__(self) -> None:
        for parameter in nn.ModuleList(self.layers).parameters():
            parameter.register_post_accumulate_grad_hook(_drop_gradient)

    @property
    def regions(self) -> int:
        """Regions entered by one forward."""
        return len(self.layers) if self.depth == 1 else len(self.layers) + len(self.layers) // 2 + len(self.layers) // 4


def workloads(device: str) -> list[Workload]:
    """The four shapes of region that the goals are stated for."""

    def on(layers: list[nn.Module]) -> list[nn.Module]:
        return [layer.to(device) for layer in layers]

    def small() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def noisy() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64))

    torch.manual_seed(0)
    return [
        Workload("gpt", on([Block(64, 4) for _ in range(12)]), torch.randn(2, 16, 64, device=device)),
        Workload("mlp", on([small() for _ in range(64)]), torch.randn(8, 64, device=device)),
        Workload("nested", on([small() for _ in range(16)]), torch.randn(8, 64, device=device), depth=3),
        Workload("noisy", on([noisy() for _ in range(12)]), torch.randn(8, 64, device=device)),
    ]


class Chain:
    """Runs callables one after the other: what a region of several layers holds."""

    def __init__(self, parts: list[Callable[..., Any]]) -> None:
        self.parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def build(workload: Workload, region: Region) -> Step:
    """A step of the workload: forward and backward, each layer in a region, pairs and fours of them in regions again."""
    level: list[Callable[..., Any]] = [region(layer) for layer in workload.layers]
    for _ in range(workload.depth - 1):
        level = [region(Chain(level[i : i + 2])) for i in range(0, len(level), 2)]

    def step() -> torch.Tensor:
        x = workload.inputs.detach().requires_grad_()
        for part in level:
            x = part(x)
        loss = x.square().mean()
        loss.backward()
        return loss

    return step


def reference(workload: Workload) -> Step:
    """Two forwards with gradients and one backward: what any replay of every layer must cost at least."""
    plain = build(workload, lambda fn: fn)

    def step() -> torch.Tensor:
        x = workload.inputs.detach().requires_grad_()
        for layer in workload.layers:
            x = layer(x)
        del x
        return plain()

    return step


def _torch_form(*, use_reentrant: bool) -> Region:
    def region(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: torch_checkpoint(fn, *args, use_reentrant=use_reentrant)

    return region


def sides(workload: Workload) -> dict[str, Region]:
    """Every implementation that is installed, by name; torch_remat refuses nested regions."""
    found = {
        "torch non-reentrant": _torch_form(use_reentrant=False),
        "torch reentrant": _torch_form(use_reentrant=True),
        "lowtide": checkpoint,
    }
    if workload.depth > 1 or find_spec("torch_remat") is None:
        return found
    import torch_remat

    return {**found, "torch_remat": torch_remat.checkpoint()}


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def overheads_s(workload: Workload, rounds: int, device: str) -> tuple[float, dict[str, float]]:
    """Median time of the reference step, and of each side beyond it, per region."""
    steps = {"reference": reference(workload)} | {name: build(workload, region) for name, region in sides(workload).items()}
    for step in list(steps.values()) * 8:
        step()
    names = list(steps)
    seen: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        gc.collect()
        gc.disable()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _settle(device)
            start = time.perf_counter()
            steps[name]()
            seen[name].append(time.perf_counter() - start)
        gc.enable()
    base = seen.pop("reference")
    beyond = {name: statistics.median(a - b for a, b in zip(times, base, strict=True)) / workload.regions for name, times in seen.items()}
    return statistics.median(base), beyond


def peak_bytes(step: Step, device: str) -> tuple[int, int]:
    """Most bytes alive at once in a step beyond its start, and bytes still alive at its end while the loss is held."""
    step()
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True, use_device=None if device == "cpu" else "cuda") as profile:
        loss = step()
        _settle(device)
    changes = [e for e in profile.kineto_results.events() if e.name() == "[memory]" and str(e.device_type()).endswith(device.upper()[:4])]
    alive = peak = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        alive += change.nbytes()
        peak = max(peak, alive)
    del loss
    return peak, alive


def objects_left(step: Step, steps: int = 5) -> float:
    """Python objects that a step leaves for the garbage collector to find, with the collector off."""
    step()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(steps):
            step()
        return (len(gc.get_objects()) - before) / steps
    finally:
        gc.enable()


def call_cost_s(grad_mode: bool, rounds: int = 41, calls: int = 2000) -> float:
    """Time of one call that records no gradients, beyond a plain call of the same function."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x

    x, run = torch.ones(1), checkpoint(fn)

    def time_of(call: Callable[..., Any]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call(x)
        return (time.perf_counter() - start) / calls

    with torch.set_grad_enabled(grad_mode):
        return statistics.median(time_of(run) - time_of(fn) for _ in range(rounds))


@dataclass(frozen=True)
class Row:
    """One workload's figures."""

    workload: str
    regions: int
    reference_s: float
    overhead_s: dict[str, float]
    peak_bytes: dict[str, int]
    left_bytes: dict[str, int]
    left_objects: dict[str, float]

    def ratio(self, other: str) -> float:
        """lowtide's overhead over another side's."""
        return self.overhead_s["lowtide"] / self.overhead_s[other] if other in self.overhead_s else float("nan")


def measure(workload: Workload, rounds: int, device: str) -> Row:
    """All figures of one workload."""
    reference_s, overhead_s = overheads_s(workload, rounds, device)
    built = {"plain": build(workload, lambda fn: fn)} | {name: build(workload, region) for name, region in sides(workload).items()}
    for step in list(built.values()) * 4:
        step()
    memory = {name: peak_bytes(step, device) for name, step in built.items()}
    objects = {name: objects_left(step) for name, step in built.items()}
    peaks, left = ({name: pair[i] for name, pair in memory.items()} for i in (0, 1))
    return Row(workload.name, workload.regions, reference_s, overhead_s, peaks, left, objects)


def show(row: Row) -> None:
    """Prints one workload's figures."""
    print(f"\n{row.workload}: {row.regions} regions, two forwards + backward {row.reference_s * 1e3:.2f} ms")
    print(f"  {'':22}{'overhead/region':>16}{'peak':>12}{'left after':>12}{'objects left':>14}")
    print(f"  {'plain':22}{'':>16}{row.peak_bytes['plain']:>12,}{row.left_bytes['plain']:>12,}{row.left_objects['plain']:>14.1f}")
    for name, seconds in row.overhead_s.items():
        print(f"  {name:22}{seconds * 1e6:>13.1f} µs{row.peak_bytes[name]:>12,}{row.left_bytes[name]:>12,}{row.left_objects[name]:>14.1f}")
    for other in ("torch non-reentrant", "torch reentrant", "torch_remat"):
        if other in row.overhead_s:
            print(f"  lowtide / {other:22} {row.ratio(other):.2f}")


def profile(workload: Workload, steps: int = 60) -> None:
    """Prints where the time of lowtide's step goes, by function."""
    step = build(workload, checkpoint)
    for _ in range(8):
        step()
    recorder = cProfile.Profile()
    recorder.enable()
    for _ in range(steps):
        step()
    recorder.disable()
    pstats.Stats(recorder).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", help="one workload: gpt, mlp, nested or noisy")
    parser.add_argument("--profile", help="profile lowtide on one workload instead")
    parser.add_argument("--save", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
    chosen = {w.name: w for w in workloads(args.device)}
    if args.profile:
        return profile(chosen[args.profile])
    compiled = "in Python" if native is None else "compiled"
    print(f"torch {torch.__version__}, {args.device}, engine {compiled}, {args.rounds} rounds, medians")
    rows = []
    for workload in chosen.values() if args.only is None else [chosen[args.only]]:
        rows.append(measure(workload, args.rounds, args.device))
        show(rows[-1])
    calls_s = {"under no_grad": call_cost_s(grad_mode=False), "nothing requires grad": call_cost_s(grad_mode=True)}
    print("\na call that records no gradients, beyond calling fn")
    for name, seconds in calls_s.items():
        print(f"  {name:22}{seconds * 1e6:>13.2f} µs")
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        run = {"torch": torch.__version__, "device": args.device, "rounds": args.rounds}
        figures = {**run, "rows": [asdict(row) for row in rows], "call_s": calls_s}
        args.save.write_text(json.dumps(figures, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
