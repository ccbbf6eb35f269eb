"""Peak of a rank and processor time of a step for replay × ZeRO × sequence × attention, and for a pipeline of one stage and of two.

A llama of two small blocks under gloo on two processes (one for a pipeline of one stage). The settings that differ in replay alone are
timed in turns.
Writes ``benchmarks/results/parallel_matrix.csv`` and the page ``docs/parallel-matrix.md`` with table, plots and a paragraph for each
finding, all of it computed from this very run. A run that was interrupted goes on where it stopped, from what it noted in
``parallel_matrix.unfinished.jsonl`` beside the results; delete that file to measure all again.

    python benchmarks/parallel_matrix.py [--sequences 16 32 256 1024] [--rounds 7] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from _parallel import Found, measured
from _parallel_findings import ATTENTION, POLICIES, STAGES, ZERO, Cell, Cells, findings, markdown, plot, table
from rich.console import Console

from lowtide.units import format_bytes

REPLICAS = {"layers": 2, "batch": 2}
PIPELINE = {"layers": 2, "batch": 1, "micro_batches": 2}
_LONG = 128
"""Steps of shorter sequences are timed more often, in proportion."""


Place = tuple[str, int, int, str]
"""Engine, split, sequence, attention: the settings of a group."""


def measured_cells(sequences: list[int], rounds: int, notes: Notes) -> Iterator[Cell]:
    """All settings, as they are measured; of each, a line is printed."""
    for engine, world, splits in (("ZeRO", 2, ZERO), *(("pipeline", stages, (stages,)) for stages in STAGES)):
        places = [(engine, *place) for place in itertools.product(splits, sequences, ATTENTION)]
        known = [place for place in places if place in notes]
        new = newly_measured(world, [place for place in places if place not in known], rounds, notes)
        for cells in itertools.chain(map(notes.cells, known), new):
            print(line(cells), flush=True)
            yield from cells


def newly_measured(world: int, places: list[Place], rounds: int, notes: Notes) -> Iterator[list[Cell]]:
    """A group at a time; each is noted."""
    began = time.monotonic()
    groups = [[asked(*place, policy) for policy in POLICIES] for place in places]
    times = [rounds * max(1, _LONG // sequence) for _, _, sequence, _ in places]
    for place, found in zip(places, measured(world, groups, times) if groups else (), strict=True):
        cells = [Cell(*place, policy, *figures) for policy, figures in zip(POLICIES, summaries(found), strict=True)]
        now = time.monotonic()
        notes.add(place, cells, now - began)
        began = now
        yield cells


class Notes:
    """What an interrupted run has measured, by group; a file of JSON lines."""

    def __init__(self, file: Path, rounds: int) -> None:
        self._file, self._rounds = file, rounds
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else ())
        self._found = {tuple(entry["place"]): entry for entry in lines if entry["rounds"] == rounds}

    def __contains__(self, place: Place) -> bool:
        return place in self._found

    def cells(self, place: Place) -> list[Cell]:
        return [Cell(*cell) for cell in self._found[place]["cells"]]

    def add(self, place: Place, cells: list[Cell], seconds: float) -> None:
        entry = {"place": place, "rounds": self._rounds, "cells": [astuple(cell) for cell in cells], "seconds": seconds}
        self._found[place] = entry
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    @property
    def minutes(self) -> float:
        """That all of it took."""
        return sum(float(entry["seconds"]) for entry in self._found.values()) / 60

    def drop(self) -> None:
        """The run is over."""
        self._file.unlink(missing_ok=True)


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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent)
    arguments = parser.parse_args()
    notes = Notes(arguments.out / "benchmarks" / "results" / "parallel_matrix.unfinished.jsonl", arguments.rounds)
    cells = Cells(list(measured_cells(arguments.sequences, arguments.rounds, notes)))
    console = Console(width=120)
    console.print(table(cells, "ZeRO"), table(cells, "pipeline"))
    for paragraph in findings(cells):
        console.print(f"\n{paragraph}", highlight=False)
    write(cells, arguments.out, notes.minutes)
    notes.drop()


if __name__ == "__main__":
    main()
