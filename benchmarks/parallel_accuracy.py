"""The peak of live bytes that is predicted for each rank, over the one measured there.

Predicted: ``lowtide.simulate`` on the trace of one process, rewritten by ``lowtide.distributed.on_ranks`` for DDP and ZeRO-1 to -3; for
pipelines, on the trace of one micro-batch on a rank's part of the model, rewritten by ``in_pipeline``. Measured, in each process under
gloo: what is alive before a step, and how far the allocator's level rises in it. The exit status says whether every rank is within 3 %.

    python benchmarks/parallel_accuracy.py [--ranks 2 4] [--engine 1F1B]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _parallel import measured, predicted
from rich.console import Console
from rich.table import Table

from lowtide.units import format_bytes

ALLOWED = 0.03
SIZES = {"layers": 4, "sequence": 128, "attention": "math", "batch": 4}


def cases(world: int) -> list[tuple[str, dict[str, Any]]]:
    """Every engine with and without replay; 1F1B on any number of ranks, the other schedules on two."""
    replicas = [(f"ZeRO-{zero}" if zero else "DDP", {"zero": zero}) for zero in range(4)]
    pipelines = [(f"1F1B, {world} stages", {"micro_batches": 6, "batch": 2})]
    if world == 2:
        pipelines += [(name, {"micro_batches": 4, "batch": 2, "schedule": name}) for name in ("gpipe", "zero-bubble")]
        pipelines += [("interleaved, 2 parts", {"micro_batches": 4, "batch": 2, "schedule": "interleaved", "chunks": 2})]
    policies = ("none", "full", "selective") if world == 2 else ("none", "full")
    return [(name, {**SIZES, **engine, "policy": policy}) for name, engine in [*replicas, *pipelines] for policy in policies]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--engine", default="", help="only those whose name holds this")
    table = Table("ranks", "engine", "replay", "measured, by rank", "predicted over measured, by rank", "within 3 %")
    torch.set_num_threads(1)
    exact = True
    arguments = parser.parse_args()
    for world in arguments.ranks:
        asked = [case for case in cases(world) if arguments.engine in case[0]]
        for (name, case), (found,) in zip(asked, measured(world, [[case] for _, case in asked]), strict=True):
            ratios = [one / rank["peak_bytes"] for one, rank in zip(predicted(world, case), found, strict=True)]
            within = all(abs(ratio - 1) <= ALLOWED for ratio in ratios)
            exact &= within
            peaks = "  ".join(format_bytes(int(rank["peak_bytes"])) for rank in found)
            print(f"{world} ranks, {name}, {case['policy']}: {'  '.join(f'{ratio:.4f}' for ratio in ratios)}", flush=True)
            table.add_row(str(world), name, case["policy"], peaks, "  ".join(f"{ratio:.4f}" for ratio in ratios), "yes" if within else "NO")
    Console(width=150).print(table)
    return 0 if exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
