"""What the cells of ``parallel_matrix`` say: a table, a paragraph for each finding, and plots. All of it follows from the cells alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lowtide.units import format_bytes

POLICIES, ATTENTION, ZERO, STAGES = ("none", "selective", "full"), ("math", "fused"), (0, 1, 2, 3), (1, 2)
PAYS, SAME = 0.95, 0.99
"""Replay pays where it leaves less than this of the peak; two peaks are the same where one is at least this share of the other."""
_MARKS = {"none": "o", "selective": "s", "full": "^"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting, measured.

    Attributes:
        engine: ``"ZeRO"`` or ``"pipeline"``.
        split: the stage of ZeRO, or how many stages the pipeline has.
        sequence, attention, replay: of the model.
        peak_bytes: of the rank that holds the most.
        step_s, processor_s: median time of a step, and of the processor in it.
        over_none: processor time over that without replay, the median of the ratios round by round.
    """

    engine: str
    split: int
    sequence: int
    attention: str
    replay: str
    peak_bytes: int
    step_s: float
    processor_s: float
    over_none: float


class Cells:
    """All of them, by setting."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.all = list(cells)
        self._found = {(c.engine, c.split, c.sequence, c.attention, c.replay): c for c in cells}
        self.sequences = sorted({cell.sequence for cell in cells})

    def at(self, engine: str, split: int, sequence: int, attention: str, replay: str) -> Cell:
        return self._found[engine, split, sequence, attention, replay]

    def left(self, engine: str, split: int, sequence: int, attention: str, replay: str) -> float:
        """What a replay leaves of the peak."""
        plain = self.at(engine, split, sequence, attention, "none")
        return self.at(engine, split, sequence, attention, replay).peak_bytes / plain.peak_bytes

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(Cell.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in self.all)
        return text.getvalue()

    def rows(self, engine: str) -> Iterator[list[str]]:
        """One for each sequence, attention and split; a column for each replay: peak, and processor time over that without replay."""
        for attention in ATTENTION:
            for n in self.sequences:
                for split in ZERO if engine == "ZeRO" else STAGES:
                    cells = [self.at(engine, split, n, attention, policy) for policy in POLICIES]
                    yield [str(n), attention, str(split), *(f"{format_bytes(c.peak_bytes)}  ×{c.over_none:.2f}" for c in cells)]


def header(engine: str) -> list[str]:
    return ["sequence", "attention", "ZeRO" if engine == "ZeRO" else "stages", *POLICIES]


def table(cells: Cells, engine: str) -> Table:
    """For a terminal."""
    found = Table(*header(engine), title=f"peak of a rank, and processor time of a step over that without replay ({engine})")
    for row in cells.rows(engine):
        found.add_row(*row)
    return found


def markdown(cells: Cells, engine: str) -> str:
    """For a page."""
    lines = [header(engine), ["---"] * 6, *cells.rows(engine)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def findings(cells: Cells) -> list[str]:
    """A paragraph each."""
    return [_where_replay_pays(cells), _where_stage_three_gains_nothing(cells), _what_fused_attention_takes(cells), _pipeline(cells)]


def _where_replay_pays(cells: Cells) -> str:
    parts = "; ".join(
        f"with {attention} attention {_listed_stages([_first_that_pays(cells, split, attention) for split in ZERO])}"
        for attention in ATTENTION
    )
    return (
        f"**Where replay starts to pay.** Replaying every block takes more than {1 - PAYS:.0%} off the peak of a rank: {parts}. "
        f"{_price(cells)}"
    )


def _first_that_pays(cells: Cells, split: int, attention: str) -> int | None:
    return next((n for n in cells.sequences if cells.left("ZeRO", split, n, attention, "full") < PAYS), None)


def _listed_stages(first: list[int | None]) -> str:
    """Stages of ZeRO by the sequence from which something holds."""
    names = {n: [_name("ZeRO", split) for split, found in zip(ZERO, first, strict=True) if found == n] for n in dict.fromkeys(first)}
    begins = {n: "at no sequence tried" if n is None else f"from sequence {n} on" for n in names}
    return ", ".join(f"{begins[n]} under {_and(found)}" for n, found in names.items())


def _name(engine: str, split: int) -> str:
    if engine == "ZeRO":
        return f"ZeRO-{split}" if split else "DDP"
    return f"{split} stage{'s' if split > 1 else ''}"


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _price(cells: Cells) -> str:
    n = cells.sequences[-1]
    parts = (
        f"{1 - cells.left('ZeRO', 0, n, kind, 'full'):.0%} with {kind} attention, for {cells.at('ZeRO', 0, n, kind, 'full').over_none:.2f} "
        "times the processor time of a step"
        for kind in ATTENTION
    )
    return f"At sequence {n} under DDP it takes off {', and '.join(parts)}."


def _where_stage_three_gains_nothing(cells: Cells) -> str:
    places = [(n, attention, policy) for attention in ATTENTION for n in cells.sequences for policy in POLICIES]
    ratios = {p: cells.at("ZeRO", 3, *p).peak_bytes / cells.at("ZeRO", 2, *p).peak_bytes for p in places}
    none = [place for place, ratio in ratios.items() if ratio >= SAME]
    by_policy = "; ".join(f"replay {p}: {_listed(cells, [place[:2] for place in none if place[2] == p])}" for p in POLICIES)
    best = min(places, key=lambda place: ratios[place])
    return (
        f"**Where ZeRO-3 gains nothing over ZeRO-2.** It holds no less (within {1 - SAME:.0%}) in {len(none)} of {len(places)} settings "
        f"({by_policy}). At best (sequence {best[0]}, {best[1]} attention, replay {best[2]}) it holds {1 - ratios[best]:.1%} less."
    )


def _listed(cells: Cells, places: list[tuple[int, str]]) -> str:
    """Sequences and attention, in few words."""
    if not places:
        return "nowhere"
    of_kind = {kind: [n for n, attention in places if attention == kind] for kind in ATTENTION}
    if all(found == cells.sequences for found in of_kind.values()):
        return "everywhere"
    return ", ".join(f"{_sequences(cells, found)} with {kind} attention" for kind, found in of_kind.items() if found)


def _sequences(cells: Cells, found: list[int]) -> str:
    return "all sequences" if found == cells.sequences else f"sequence {', '.join(map(str, found))}"


def _what_fused_attention_takes(cells: Cells) -> str:
    longest = cells.sequences[-1]
    saved = {kind: 1 - cells.left("ZeRO", 0, longest, kind, "selective") for kind in ATTENTION}
    plain = {kind: cells.at("ZeRO", 0, longest, kind, "none").peak_bytes for kind in ATTENTION}
    return (
        f"**What fused attention takes from selective replay.** At sequence {longest} under DDP, selective replay takes "
        f"{saved['math']:.0%} off the peak with math attention and {saved['fused']:.0%} with fused attention, which never has the "
        f"matrices of scores that selective replay drops: without any replay "
        f"its peak is {plain['fused'] / plain['math']:.0%} of that with math attention."
    )


def _pipeline(cells: Cells) -> str:
    n = cells.sequences[-1]

    def share(attention: str) -> str:
        ratios = (
            cells.at("pipeline", 2, n, attention, p).peak_bytes / cells.at("pipeline", 1, n, attention, p).peak_bytes for p in POLICIES
        )
        return ", ".join(f"{policy} {ratio:.0%}" for policy, ratio in zip(POLICIES, ratios, strict=True))

    return (
        f"**What a second stage takes off.** At sequence {n} the fuller of two stages holds, of what one stage holds: {share('math')} "
        f"with math attention; {share('fused')} with fused. The first stage has two micro-batches in flight, so activations are not "
        "halved as parameters are."
    )


def plot(cells: Cells, value: str, label: str, file: Path) -> None:
    """A figure over sequences, a panel for each engine and attention."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lowtide"})
    import matplotlib.pyplot as plt

    columns = [("ZeRO", split) for split in ZERO] + [("pipeline", split) for split in STAGES]
    figure, grid = plt.subplots(len(ATTENTION), len(columns), figsize=(14, 5), sharex=True, sharey=True, layout="constrained")
    for attention, axes in zip(ATTENTION, grid, strict=True):
        for (engine, split), axis in zip(columns, axes, strict=True):
            _panel(axis, cells, engine, split, attention, value)
    figure.legend(*grid[0][0].get_legend_handles_labels(), title="replay", loc="outside right upper")
    figure.supxlabel("sequence")
    figure.supylabel(label)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def _panel(axis: Any, cells: Cells, engine: str, split: int, attention: str, value: str) -> None:
    for policy in POLICIES:
        found = [getattr(cells.at(engine, split, n, attention, policy), value) for n in cells.sequences]
        heights = [each / 2**20 for each in found] if value == "peak_bytes" else found
        axis.plot(cells.sequences, heights, marker=_MARKS[policy], markersize=4, label=policy)
    axis.set(xscale="log", yscale="log" if value == "peak_bytes" else "linear", title=f"{_name(engine, split)}, {attention}")
    axis.set_xticks(cells.sequences, map(str, cells.sequences))
    axis.minorticks_off()
