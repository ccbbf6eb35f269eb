"""Peak of a rank and processor time of a step for replay × ZeRO × sequence × attention, and for a pipeline of one stage and of two.

A llama of two small blocks under gloo on two processes (one for a pipeline of one stage). The settings that differ in replay alone are
timed in turns.
Writes ``benchmarks/results/parallel_matrix.csv`` and the page ``docs/parallel-matrix.md`` with table, plots and a paragraph for each
finding, all of it computed from this very run.

    python benchmarks/parallel_matrix.py [--sequences 16 32 256 1024] [--rounds 2] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _parallel import Found, measured
from _parallel_findings import ATTENTION, POLICIES, STAGES, ZERO, Cell, Cells, findings, markdown, plot, table
from rich.console import Console

from lowtide.units import format_bytes

REPLICAS = {"layers": 2, "batch": 2}
PIPELINE = {"layers": 2, "batch": 1, "micro_batches": 2}


def measured_cells(sequences: list[int], rounds: int) -> Iterator[Cell]:
    """All settings, as they are measured; of each, a line is printed."""
    for engine, world, splits in (("ZeRO", 2, ZERO), *(("pipeline", stages, (stages,)) for stages in STAGES)):
        places = list(itertools.product(splits, sequences, ATTENTION))
        groups = [[asked(engine, *place, policy) for policy in POLICIES] for place in places]
        for place, found in zip(places, measured(world, groups, rounds), strict=True):
            cells = [Cell(engine, *place, policy, *figures) for policy, figures in zip(POLICIES, summaries(found), strict=True)]
            print(line(cells), flush=True)
            yield from cells


def asked(engine: str, split: int, sequence: int, attention: str, policy: str) -> dict[str, Any]:
    """What the processes are to run."""
    sizes = {**REPLICAS, "zero": split} if engine == "ZeRO" else PIPELINE
    return {**sizes, "sequence": sequence, "attention": attention, "policy": policy}


def summaries(found: list[list[Found]]) -> Iterator[tuple[int, float, float, float]]:
    """Of each policy: largest peak of a rank, median times of a step and of the processor in it, and the latter over the first's.

    Times are those of the slower rank of each round.
    """
    plain = _slowest(found[0], "processor_s")
    for ranks in found:
        processor_s = _slowest(ranks, "processor_s")
        ratios = [one / other for one, other in zip(processor_s, plain, strict=True)]
        medians = map(statistics.median, (_slowest(ranks, "seconds"), processor_s, ratios))
        yield max(rank["peak_bytes"] for rank in ranks), *medians


def _slowest(ranks: list[Found], name: str) -> list[float]:
    return list(map(max, zip(*(rank[name] for rank in ranks), strict=True)))


def line(cells: list[Cell]) -> str:
    """What is printed as soon as a group is measured."""
    first = cells[0]
    parts = "   ".join(f"{c.replay} {format_bytes(c.peak_bytes)} ×{c.over_none:.2f}" for c in cells)
    return f"{first.engine} {first.split}, sequence {first.sequence}, {first.attention}: {parts}"


def page(cells: Cells, minutes: float) -> str:
    """The page of the documentation."""
    paragraphs = "\n\n".join(findings(cells))
    return f"""# The matrix of parallel training

<!-- Written by benchmarks/parallel_matrix.py; run it again rather than edit this. -->

What a rank of a llama of two small blocks holds at its peak, and what a step takes, for every way to replay, to shard, to split into
stages and to attend: `make parallel-matrix` measures it on gloo
processes in a few minutes ({minutes:.0f} for what is below) and writes this page.

{paragraphs}

## Peaks

![Peak of a rank over sequence, by ZeRO stage or pipeline, attention and replay](assets/parallel-matrix-peaks.svg)

## Times

Processor time of a step over that of the same step without replay, the two run in turns: what waits for the other rank is not in it.

![Time of a step over that without replay, over sequence](assets/parallel-matrix-times.svg)

## ZeRO

{markdown(cells, "ZeRO")}

## Pipelines

{markdown(cells, "pipeline")}
"""


def write(cells: Cells, out: Path, minutes: float) -> None:
    """Results and page."""
    results, docs = out / "benchmarks" / "results", out / "docs"
    for folder in (results, docs / "assets"):
        folder.mkdir(parents=True, exist_ok=True)
    (results / "parallel_matrix.csv").write_text(cells.csv(), encoding="utf-8")
    (docs / "parallel-matrix.md").write_text(page(cells, minutes), encoding="utf-8")
    plot(cells, "peak_bytes", "peak of a rank, MiB", docs / "assets" / "parallel-matrix-peaks.svg")
    plot(cells, "over_none", "processor time over that without replay", docs / "assets" / "parallel-matrix-times.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="*", default=[16, 32, 256, 1024])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent)
    arguments = parser.parse_args()
    began = time.monotonic()
    cells = Cells(list(measured_cells(arguments.sequences, arguments.rounds)))
    console = Console(width=120)
    console.print(table(cells, "ZeRO"), table(cells, "pipeline"))
    for paragraph in findings(cells):
        console.print(f"\n{paragraph}", highlight=False)
    write(cells, arguments.out, (time.monotonic() - began) / 60)


if __name__ == "__main__":
    main()
