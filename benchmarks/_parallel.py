"""What ``parallel_accuracy`` and ``parallel_matrix`` share: processes that measure, and what is predicted for them from a trace of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _parallel_rank import ARCHITECTURE, decoder, loss_of, parts, tokens, training_step
from torch import nn

import lowtide
from lowtide.distributed import in_pipeline, on_ranks
from lowtide.plan import PlannedRegion

Asked = dict[str, Any]
Found = dict[str, Any]
"""``peak_bytes``, and ``seconds`` of each round."""


def measured(world: int, groups: list[list[Asked]], rounds: Sequence[int] = ()) -> Iterator[list[list[Found]]]:
    """What the processes find, a group at a time, as it comes: by question, then by rank.

    Args:
        world: how many processes.
        groups: what to run; the steps of a group are timed in turns.
        rounds: of timing, of each group; none by default.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    script = str(Path(__file__).with_name("_parallel_rank.py"))
    asked = json.dumps(list(zip(groups, rounds or [0] * len(groups), strict=True)))
    with tempfile.TemporaryDirectory() as folder:
        commands = [[sys.executable, script, str(rank), str(world), f"{folder}/store", asked] for rank in range(world)]
        processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands]
        try:
            for _ in groups:
                by_rank = [_answer(process) for process in processes]
                yield [list(answers) for answers in zip(*by_rank, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def _answer(process: subprocess.Popen[str]) -> list[Found]:
    assert process.stdout is not None
    line = next((line for line in process.stdout if line.startswith("[{")), None)
    if line is None:
        raise SystemExit(f"a process ended with exit status {process.wait()}; what it wrote is above")
    answer: list[Found] = json.loads(line)
    return answer


def predicted(world: int, asked: Asked) -> list[int]:
    """Peak of each rank, from traces of a single process."""
    return _of_stages(world, asked) if asked.get("micro_batches") else _of_replicas(world, asked)


def _of_replicas(world: int, asked: Asked) -> list[int]:
    model = decoder(asked["layers"], asked["sequence"], asked["attention"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    traced = lowtide.trace(model, training_step(model, optimizer, tokens(asked["batch"], asked["sequence"])))
    units = [f"blocks.{layer}" for layer in range(asked["layers"])]
    regions = _regions(asked["policy"], asked["layers"])
    return [lowtide.simulate(on_ranks(traced, world, asked["zero"], units, rank), regions).peak_bytes for rank in range(world)]


def _of_stages(world: int, asked: Asked) -> list[int]:
    return [peaks_of_rank(rank, world, asked, [asked["policy"]])[0] for rank in range(world)]


def peaks_of_rank(rank: int, ranks: int, asked: Asked, policies: Sequence[str | int]) -> list[int]:
    """Under each policy, from the trace of one micro-batch on this rank's part of the model, without the other ranks."""
    module, schedule = parts(asked, rank, ranks), asked.get("schedule", "1f1b")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    traced = lowtide.trace(module, one_micro_batch(module, optimizer, asked, rank, ranks))
    paths, layers = [str(number) for number in range(len(module))], len(module[0].blocks)
    returns = asked.get("returns_results", True)
    piped = in_pipeline(traced, rank, ranks, asked["micro_batches"], schedule, paths, returns_results=returns)
    regions = ([region for path in paths for region in _regions(policy, layers, f"{path}.")] for policy in policies)
    return [lowtide.simulate(piped, each).peak_bytes for each in regions]


def one_micro_batch(module: nn.ModuleList, optimizer: torch.optim.Optimizer, asked: Asked, rank: int, ranks: int) -> Any:
    """A step of each part by itself; what other ranks would send is there before it."""
    shape, batch = (asked["batch"], asked["sequence"], ARCHITECTURE.width), tokens(asked["batch"], asked["sequence"])
    has_first, has_last = rank == 0, rank == ranks - 1
    received = [batch if has_first and index == 0 else torch.zeros(shape, requires_grad=True) for index in range(len(module))]
    gradients = [torch.zeros(shape) for _ in range(len(module) - has_last)]

    def step() -> None:
        optimizer.zero_grad()
        results = [part(given) for part, given in zip(module, received, strict=True)]
        if has_last:
            loss_of(results[-1], batch).backward()
        for result, gradient in reversed(list(zip(results, gradients, strict=False))):
            result.backward(gradient)
        for given in received:
            given.grad = None
        optimizer.step()

    return step


def _regions(policy: str | int, layers: int, inside: str = "") -> tuple[PlannedRegion, ...]:
    below, count = (".attention.core", layers) if policy == "selective" else ("", {"none": 0, "full": layers}.get(policy, policy))
    return tuple(PlannedRegion((f"{inside}blocks.{layer}{below}",)) for layer in range(int(count)))
