"""``lowtide estimate``: the memory of training a transformer on many ranks, by closed forms."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lowtide.cli._failures import reported
from lowtide.cli._streams import progress
from lowtide.distributed import (
    POLICIES,
    Agreement,
    Estimate,
    Setup,
    agreement,
    architecture,
    bundled,
    estimate,
    parse_mesh,
    trace_architecture,
)
from lowtide.errors import InvalidInputError
from lowtide.units import format_bytes

CONFIG = f"A bundled config ({', '.join(bundled())}), or the path of a Hugging Face config.json."
SEQUENCE = "Tokens of a sample."
MESH = "Ranks by what they split: dp=8,pp=4,tp=2."
SCHEDULE = "Of the pipeline: gpipe, 1f1b, interleaved, zero-bubble."
ATTENTION = "fused never has the matrix of scores; math has it."
PRECISION = "half: 2 bytes a value, 12 of optimizer state a parameter; single: 4 and 8."


def estimate_command(
    config: Annotated[str, typer.Argument(help=CONFIG, show_default=False)],
    seq: Annotated[int, typer.Option(min=1, help=SEQUENCE)] = 2048,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples that a rank takes at once.")] = 1,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    mesh: Annotated[str, typer.Option(help=MESH)] = "dp=8",
    zero: Annotated[list[int] | None, typer.Option(min=0, max=3, help="ZeRO stage; several may be given. All, without it.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help=f"{', '.join(POLICIES)}; several may be given. All, without it.")] = None,
    schedule: Annotated[str, typer.Option(help=SCHEDULE)] = "1f1b",
    chunks: Annotated[int, typer.Option(min=1, help="Stages that a rank holds in an interleaved schedule.")] = 1,
    sequence_parallel: Annotated[bool, typer.Option(help="Split by position what tp does not split.")] = False,
    attention: Annotated[str, typer.Option(help=ATTENTION)] = "fused",
    precision: Annotated[str, typer.Option(help=PRECISION)] = "half",
    traced: Annotated[bool, typer.Option(help="Compare with a trace under fake tensors of one rank.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the estimates for machines on standard output.")] = False,
) -> None:
    """Estimate what each rank holds: parameters, gradients, optimizer, activations, temporaries; and what replay costs."""
    with reported():
        model = architecture(config)
        setup = Setup(
            sequence=seq, micro_batch=micro_batch, micro_batches=micro_batches, mesh=parse_mesh(mesh), schedule=schedule,
            chunks=chunks, sequence_parallel=sequence_parallel, attention=attention, **bytes_of(precision),
        )  # fmt: skip
        stages = tuple(dict.fromkeys(zero or (0, 1, 2, 3)))
        found = [estimate(model, replace(setup, zero=stage), name) for stage in stages for name in policy or POLICIES]
        if traced:
            progress()("tracing under fake tensors")
            trace = trace_architecture(model, setup)
            compared = [agreement(trace, model, setup, name) for name in policy or POLICIES]
        else:
            compared = []
        if as_json:
            print(json.dumps({"estimates": [as_data(each) for each in found], "traced": [_compared(each) for each in compared]}, indent=2))
        else:
            _show(found, compared)


def bytes_of(precision: str) -> dict[str, int]:
    """Bytes a value, a gradient, and of optimizer state.

    Raises:
        InvalidInputError: no such precision.
    """
    sizes = {"half": (2, 2, 12), "single": (4, 4, 8)}
    if precision not in sizes:
        raise InvalidInputError(f"--precision is half or single; found {precision!r}")
    return dict(zip(("value_bytes", "gradient_bytes", "optimizer_bytes"), sizes[precision], strict=True))


def as_data(found: Estimate) -> dict[str, Any]:
    """An estimate for machines, in bytes."""
    ranks = [{**asdict(rank), "peak_bytes": rank.peak_bytes} for rank in found.ranks]
    return {
        "model": found.model.name, "policy": found.policy, "setup": asdict(found.setup), "peak_bytes": found.peak_bytes,
        "slowdown": found.slowdown, "ranks": ranks,
    }  # fmt: skip


def _compared(found: Agreement) -> dict[str, Any]:
    return {
        "policy": found.estimate.policy, "estimated_bytes": found.estimated_bytes, "traced_bytes": found.traced_bytes,
        "ratio": found.ratio, "agrees": found.agrees, "at": found.at,
    }  # fmt: skip


def _show(found: list[Estimate], compared: list[Agreement]) -> None:
    console = Console()
    setup = found[0].setup
    console.print(
        f"{found[0].model.name}: {found[0].model.parameters / 1e9:.2f} billion parameters; {setup.mesh}, sequence {setup.sequence}, "
        f"{setup.micro_batch} samples at once, {setup.attention} attention. GiB of the rank that holds the most:"
    )
    console.print(_table(found))
    if compared:
        console.print(_comparison(compared))


_COLUMNS = ("ZeRO", "replay", "stage", "param.", "grad.", "optim.", "activ.", "logits", "temp.", "peak", "time ×")


def _table(found: list[Estimate]) -> Table:
    table = Table(*_COLUMNS, padding=(0, 0, 0, 1), caption="Time: arithmetic of the slowest stage over a step without replays.")
    for before, each in zip([None, *found], found, strict=False):
        if before is not None and before.setup.zero != each.setup.zero:
            table.add_section()
        table.add_row(str(each.setup.zero), each.policy, *_cells(each))
    return table


def _cells(found: Estimate) -> list[str]:
    rank = max(found.ranks, key=lambda rank: rank.peak_bytes)
    sizes = (
        rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes, rank.activation_bytes, rank.logits_bytes, rank.temporary_bytes,
        rank.peak_bytes,
    )  # fmt: skip
    return [str(rank.stage), *(f"{size / 2**30:.2f}" for size in sizes), f"{found.slowdown:.3f}"]


def _comparison(compared: list[Agreement]) -> Table:
    columns = ("replay", "closed forms", "traced", "ratio", "within 3 %", "the traced peak is at")
    table = Table(*columns, title="One rank, without the optimizer")
    for each in compared:
        agrees = "yes" if each.agrees else "no"
        table.add_row(
            each.estimate.policy, format_bytes(each.estimated_bytes), format_bytes(each.traced_bytes), f"{each.ratio:.3f}", agrees, each.at
        )
    return table
