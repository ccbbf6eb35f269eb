"""``lowtide plan``: the fastest replays that fit each stage of a pipeline, before there is a cluster."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lowtide.cli._estimate import ATTENTION, CONFIG, MESH, PRECISION, SCHEDULE, SEQUENCE, as_data, bytes_of
from lowtide.cli._failures import reported
from lowtide.distributed import RankMemory, Setup, StagePlan, architecture, parse_mesh, plan_stages
from lowtide.errors import InvalidInputError
from lowtide.units import format_bytes, parse_bytes

_HEADROOM = "Share of the GPU's memory left to the driver, to communication and to fragments."


def plan_command(
    config: Annotated[str, typer.Option(help=CONFIG, show_default=False)],
    gpu: Annotated[str | None, typer.Option(help="The GPU whose memory is the budget: h100-80gb, a100-40gb, …", show_default=False)] = None,
    budget: Annotated[str | None, typer.Option(help="The budget itself, instead of a GPU: 70GiB.", show_default=False)] = None,
    mesh: Annotated[str, typer.Option(help=MESH)] = "dp=8",
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 0,
    seq: Annotated[int, typer.Option(min=1, help=SEQUENCE)] = 2048,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples that a rank takes at once.")] = 1,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Of a step; four a stage, without it.", show_default=False)] = None,
    schedule: Annotated[str, typer.Option(help=SCHEDULE)] = "1f1b",
    chunks: Annotated[int, typer.Option(min=1, help="Stages that a rank holds in an interleaved schedule.")] = 1,
    sequence_parallel: Annotated[bool, typer.Option(help="Split by position what tp does not split.")] = False,
    attention: Annotated[str, typer.Option(help=ATTENTION)] = "fused",
    precision: Annotated[str, typer.Option(help=PRECISION)] = "half",
    headroom: Annotated[float, typer.Option(min=0.0, max=0.9, help=_HEADROOM)] = 0.06,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan for machines on standard output.")] = False,
) -> None:
    """Choose for every stage how many blocks keep everything, replay attention's core, or are replayed whole."""
    with reported():
        ranks = parse_mesh(mesh)
        setup = Setup(
            sequence=seq, micro_batch=micro_batch, micro_batches=micro_batches or 4 * ranks.pp, mesh=ranks, zero=zero, schedule=schedule,
            chunks=chunks, sequence_parallel=sequence_parallel, attention=attention, **bytes_of(precision),
        )  # fmt: skip
        found = plan_stages(architecture(config), setup, _budget(gpu, budget, headroom))
        if as_json:
            print(json.dumps({"budget_bytes": found.budget_bytes, **as_data(found.estimate)}, indent=2))
        else:
            _show(found)


def _budget(gpu: str | None, budget: str | None, headroom: float) -> float:
    if (gpu is None) == (budget is None):
        raise InvalidInputError("name a GPU (--gpu h100-80gb) or a budget (--budget 70GiB), one of the two")
    if budget is not None:
        return parse_bytes(budget)
    from lowtide.trace import gpu_named

    return gpu_named(gpu or "").memory_bytes * (1 - headroom)


def _show(found: StagePlan) -> None:
    console = Console()
    setup = found.estimate.setup
    console.print(
        f"{found.estimate.model.name} on {setup.mesh}, ZeRO-{setup.zero}, sequence {setup.sequence}, {setup.micro_batches} micro-batches "
        f"of {setup.micro_batch}, {setup.schedule}; a rank may hold {format_bytes(found.budget_bytes)}:"
    )
    table = Table("stage", "blocks", "kept", "core", "whole", "states", "activations", "peak", "replays add", padding=(0, 0, 0, 1))
    for rank in found.estimate.ranks:
        table.add_row(*_cells(rank))
    console.print(table)
    console.print("Blocks that keep everything, that replay attention's core, and that are replayed whole.")
    console.print(f"The slowest stage does × {found.estimate.slowdown:.3f} the arithmetic of a step without replays. {_against(found)}")


def _cells(rank: RankMemory) -> list[str]:
    counts = (rank.stage, rank.layers, rank.replays.kept, rank.replays.selective, rank.replays.full)
    sizes = (rank.state_bytes, rank.activation_bytes, rank.peak_bytes)
    return [*map(str, counts), *map(format_bytes, sizes), f"{rank.replay_share:.1%}"]


def _against(found: StagePlan) -> str:
    if found.uniform is None:
        return "No single choice for all stages fits."
    return f"The best single choice for all stages: × {found.uniform.slowdown:.3f}."
