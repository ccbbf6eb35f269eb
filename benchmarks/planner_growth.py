"""How long planning takes as models grow: blocks that are equal, blocks that all differ, and ops a block.

Each row traces a model of small tensors (the planner sees counts, sizes and times, not values) and solves for half of what its step has
alive at the peak beyond what is there before it, with the default solver, in a process of its own. Printed are wall time and processor time
of the solve, the most resident memory of the process, tracing included, and how much memory it had before the solve.

    python benchmarks/planner_growth.py [--time-limit 60] [--plot FILE.svg] [ROW ...]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.workloads.gpt import GPT

MIB = 2**20


class Layers(nn.Module):
    """A block of so many linear layers, each with a norm and a GELU."""

    def __init__(self, width: int, inner: int, layers: int) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(layers))
        self.layers = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def equal(blocks: int) -> tuple[nn.Module, torch.Tensor]:
    """A transformer of equal blocks."""
    return GPT(blocks=blocks, width=32, heads=2, context=32, dropout=0.0), torch.randint(256, (2, 32))


def different(blocks: int) -> tuple[nn.Module, torch.Tensor]:
    """Blocks that all differ in size."""
    return nn.Sequential(*(Layers(32, 32 + 4 * ((37 * i) % blocks), 1 + i % 3) for i in range(blocks))), torch.randn(64, 32)


def deep(layers: int) -> tuple[nn.Module, torch.Tensor]:
    """Twelve equal blocks of so many layers."""
    return nn.Sequential(*(Layers(32, 128, layers) for _ in range(12))), torch.randn(64, 32)


MODELS: dict[str, Callable[[int], tuple[nn.Module, torch.Tensor]]] = {"equal": equal, "different": different, "deep": deep}
ROWS = ("equal:12", "equal:25", "equal:50", "equal:100", "equal:300", "equal:1000", "different:50", "different:200")
ROWS += ("deep:1", "deep:2", "deep:4", "deep:8")


def resident_bytes() -> int:
    """Most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(row: str, time_limit_s: float) -> dict[str, Any]:
    """Trace, and time one solve."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kind, number = row.split(":")
    model, x = MODELS[kind](int(number))

    def step() -> None:
        model(x).square().mean().backward()

    step()
    trace = lowtide.trace(model, step)
    before = sum(storage.bytes for storage in trace.storages if storage.resident)
    plain = lowtide.simulate(trace, None)
    budget = before + (plain.peak_bytes - before) // 2
    at_first = resident_bytes()
    wall, cpu = time.monotonic(), time.process_time()
    plan = lowtide.solve(trace, budget, time_limit_s=time_limit_s, progress=lambda text: print(f"  {row}: {text}", file=sys.stderr))
    return {
        "calls": len(trace.calls),
        "ops": len(trace.ops),
        "wall_s": time.monotonic() - wall,
        "cpu_s": time.process_time() - cpu,
        "before_bytes": at_first,
        "most_bytes": resident_bytes(),
        "regions": len(plan.regions),
        "solver": plan.solver,
        "gap": plan.gap,
        "slowdown": plan.predicted_step_s / plain.step_s,
    }


def in_process(row: str, time_limit_s: float) -> dict[str, Any]:
    """The same in a process of its own, for its memory."""
    command = [sys.executable, __file__, "--time-limit", str(time_limit_s), "--json", row]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(row: str, r: dict[str, Any]) -> str:
    gap = "?" if r["gap"] is None else f"{r['gap']:.2%}"
    memory = f"{r['most_bytes'] / MIB:>8.0f} {r['before_bytes'] / MIB:>8.0f}"
    times = f"{r['wall_s']:>8.1f} {r['cpu_s']:>8.1f}"
    return f"{row:<14} {r['calls']:>6} {r['ops']:>7} {times} {memory}  {r['regions']:>7} {r['slowdown']:>6.3f} {gap:>7}  {r['solver']}"


def plot(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Processor time against ops of the step, on logarithmic axes, as an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for kind in MODELS:
        rows = sorted((r["ops"], r["cpu_s"]) for row, r in found.items() if row.startswith(f"{kind}:"))
        if rows:
            axes.plot(*zip(*rows, strict=True), marker="o", label=f"{kind} blocks")
    axes.set(xscale="log", yscale="log", xlabel="ops in the step", ylabel="processor seconds to plan")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=f"of {', '.join(MODELS)}, with a number: equal:100")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", action="store_true", help="one row, in this process")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(measured(arguments.rows[0], arguments.time_limit)))
        return
    times = f"{'wall s':>8} {'cpu s':>8} {'MiB':>8} {'before':>8}"
    print(f"{'row':<14} {'calls':>6} {'ops':>7} {times}  {'regions':>7} {'time':>6} {'gap':>7}  solver")
    found: dict[str, dict[str, Any]] = {}
    for row in arguments.rows:
        found[row] = in_process(row, arguments.time_limit)
        print(line(row, found[row]), flush=True)
    if arguments.plot is not None:
        plot(arguments.plot, found)


if __name__ == "__main__":
    main()
