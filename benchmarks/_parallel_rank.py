"""A process of ``parallel_accuracy`` and ``parallel_matrix``: trains a small decoder under one engine and counts what it holds.

``_parallel_rank.py RANK WORLD STORE JSON``: the JSON says what to run, in groups whose steps are timed in turns, and a line of JSON comes
back for each group.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.distributed import Architecture, Setup
from lowtide.distributed._model import Decoder
from lowtide.measure import Times, time_in_turns
from lowtide.measure._phase_peaks import live_storages
from lowtide.policy import by_layer_type, full
from lowtide.trace import allocator_events, bucket_sizes, highest_level

Step = Callable[[], object]
ARCHITECTURE = Architecture("small llama", layers=4, width=64, heads=4, kv_heads=4, head_size=16, hidden=176, vocabulary=256)
_STEPS, _ATTEMPTS = 3, 8
SINGLE = {"value_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}


def decoder(layers: int, sequence: int, attention: str, seed: int = 0, vocabulary: int = ARCHITECTURE.vocabulary) -> Decoder:
    """The model, with weights."""
    torch.manual_seed(seed)
    return Decoder(dataclasses.replace(ARCHITECTURE, layers=layers, vocabulary=vocabulary), Setup(sequence, attention=attention, **SINGLE))


def tokens(batch: int, sequence: int) -> Tensor:
    """A batch of this process."""
    generator = torch.Generator().manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    return torch.randint(ARCHITECTURE.vocabulary, (batch, sequence), generator=generator)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of next tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def training_step(model: nn.Module, optimizer: Any, batch: Tensor) -> Step:
    """Zero, forward, backward, update."""

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch), batch).backward()
        optimizer.step()

    return step


def replayed(model: nn.Module, policy: str | int) -> None:
    """Install one of the experiments' policies; a number is how many blocks are replayed, the first ones of a part."""
    if policy in ("none", 0):
        return
    if isinstance(policy, int):
        lowtide.apply(
            nn.ModuleList(block for part in model.children() for block in part.blocks[:policy]), by_layer_type({"_Block": full()})
        )
    elif policy == "full":
        lowtide.apply(model, by_layer_type({"_Block": full()}))
    elif policy == "selective":
        lowtide.apply(model, by_layer_type({"_Core": full()}))


def data_parallel(asked: dict[str, Any]) -> tuple[nn.Module, Step]:
    """DDP, with its optimizer whole or dealt out, or ``fully_shard``."""
    model: nn.Module = decoder(asked["layers"], asked["sequence"], asked["attention"])
    replayed(model, asked["policy"])
    zero = asked["zero"]
    if zero < 2:
        model = DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    options = {"lr": 1e-3, "foreach": False}
    if zero == 1:
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    return model, training_step(model, optimizer, tokens(asked["batch"], asked["sequence"]))


class Part(nn.Module):
    """A stage of the decoder: the embedding comes with the first, norm and head with the last."""

    def __init__(self, whole: Decoder, first: bool, last: bool) -> None:
        super().__init__()
        self.tokens = whole.tokens if first else nn.Identity()
        self.blocks = whole.blocks
        self.norm = whole.norm if last else nn.Identity()
        self.head = whole.head if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x))))  # type: ignore[no-any-return]


SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}


def parts(asked: dict[str, Any], rank: int, ranks: int) -> nn.ModuleList:
    """What a rank holds of the decoder, all parts with equally many blocks."""
    count = ranks * asked.get("chunks", 1)
    numbers = range(rank, count, ranks)
    sizes = (asked["layers"] // count, asked["sequence"], asked["attention"])
    wholes = (decoder(*sizes, seed=number, vocabulary=asked.get("vocabulary", ARCHITECTURE.vocabulary)) for number in numbers)
    return nn.ModuleList(Part(whole, number == 0, number == count - 1) for whole, number in zip(wholes, numbers, strict=True))


def pipeline(asked: dict[str, Any]) -> tuple[nn.Module, Step]:
    """A pipeline's step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module, chunks, name = parts(asked, rank, world), asked.get("chunks", 1), asked.get("schedule", "1f1b")
    policies = asked["policy"]
    replayed(module, policies[rank] if isinstance(policies, list) else policies)
    stages = [pipelining.PipelineStage(m, rank + i * world, world * chunks, torch.device("cpu")) for i, m in enumerate(module)]
    held: Any = stages[0] if name in ("1f1b", "gpipe") else stages
    schedule = SCHEDULES[name](held, asked["micro_batches"], loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    generator = torch.Generator().manual_seed(1)
    shape = (asked["micro_batches"] * asked["batch"], asked["sequence"])
    batch = [torch.randint(ARCHITECTURE.vocabulary, shape, generator=generator)] if rank in (0, world - 1) else []

    def step() -> None:
        optimizer.zero_grad()
        taken = {"target": batch[0]} if rank == world - 1 else {}
        schedule.step(*(batch if rank == 0 else []), return_outputs=asked.get("returns_results", True), **taken)
        optimizer.step()

    return module, step


def measured_peak(asked: dict[str, Any]) -> tuple[int, Step]:
    """The most bytes alive in a step: what is there before it, and how far it rises; and the step.

    What a thread of gloo's is the last to hold is released where the profiler does not see it, and would count for ever. Steps of a
    training repeat, so a step that was seen whole ends at the level at which it began: such a step counts, and where a process saw none,
    all of them start over.
    """
    for _ in range(_ATTEMPTS):
        live, left_over, rise, step = _watched(asked)
        if not _anywhere(left_over != 0):
            return live + rise, step
    raise SystemExit(f"every step of {asked} left something over: at the least {left_over} bytes in {_ATTEMPTS * _STEPS} steps")


def _watched(asked: dict[str, Any]) -> tuple[int, int, int, Step]:
    """Bytes alive before a step; what is left over of it and its highest level, for the step at whose end least is; and the step."""
    gc.collect()
    of_before = live_storages(nn.Module(), torch.device("cpu")).keys()  # what was measured before is still there
    with allocator_events("measured") as events:
        model, step = pipeline(asked) if asked.get("micro_batches") else data_parallel(asked)
        for _ in range(2):
            step()
        for _ in range(_STEPS):
            gc.collect()  # a region's first call is watched, and leaves cycles behind that hold tensors
            dist.barrier()
            with record_function("measured"):
                step()
        gc.collect()
        found = live_storages(model, torch.device("cpu"))
        live = sum(size for key, size in found.items() if key not in of_before) + sum(bucket_sizes(model))
    rises = [_rise([size for moment, size in events.allocations if a <= moment <= b]) for a, b in events.spans("measured")]
    return live, *min(rises), step


def _anywhere(here: bool) -> bool:
    """Whether something holds in any process."""
    found = torch.tensor(int(here))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def measure(group: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Peak of each of a group; of ``rounds`` steps of each, all once a round, the time and the computing thread's processor time."""
    peaks, steps = zip(*map(measured_peak, group), strict=True)
    spent: list[list[float]] = [[] for _ in group]
    bounded = [_together(step, processor_s) for step, processor_s in zip(steps, spent, strict=True)]
    times = time_in_turns(bounded, rounds, torch.device("cpu")) if rounds else [Times(())] * len(group)
    return [
        {"peak_bytes": peak, "seconds": wall.seconds, "processor_s": processor_s[1:]}
        for peak, wall, processor_s in zip(peaks, times, spent, strict=True)
    ]


def _together(step: Step, processor_s: list[float]) -> Step:
    """The step from when all processes begin it until all have ended it; notes the processor time of this thread, which computes."""

    def bounded() -> None:
        dist.barrier()
        began = time.thread_time()
        step()
        processor_s.append(time.thread_time() - began)
        dist.barrier()

    return bounded


def _rise(sizes: list[int]) -> tuple[int, int]:
    """What is left over of a step, and its highest level."""
    return abs(sum(sizes)), highest_level(sizes)


def main(rank: int, world: int, store: str, text: str) -> None:
    """Measure each group that is asked for, one JSON line each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # what importing made is not looked through again and again
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for group, rounds in json.loads(text):
        print(json.dumps(measure(group, rounds)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
