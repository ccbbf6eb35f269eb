"""Stages that pass micro-batches on, under each schedule."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _training import WIDTH, Block, apply, gradients, same_as_plain
from torch import nn
from torch.distributed import pipelining

from lowtide.engine._observers import Observer, observed

MICRO_BATCHES = 4


class Replays(Observer):
    """How many calls of regions there were, and how many replays."""

    def __init__(self) -> None:
        self.calls = self.replays = 0

    def entered(self, frame, call) -> None:
        self.calls += 1

    def replayed(self, frame, seconds) -> None:
        self.replays += 1


class Handles:
    """Of all stages of a process."""

    def __init__(self, handles) -> None:
        self.handles = list(handles)

    def replay_seconds(self) -> float:
        return sum(handle.replay_seconds() for handle in self.handles)


def _loss(output, target):
    return (output - target).square().mean()


def _stage_numbers(schedule, chunks):
    rank, world = dist.get_rank(), dist.get_world_size()
    if schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):  # the first and the last stage are on one process
        return [rank, 2 * world - 1 - rank]
    return [rank + world * chunk for chunk in range(chunks)]


def _train(policy, schedule, chunks=1):
    world = dist.get_world_size()
    numbers = _stage_numbers(schedule, chunks)
    parts = []
    for number in numbers:
        torch.manual_seed(number)
        parts.append(nn.Sequential(Block(), Block()))
    handles = Handles(filter(None, (apply(part, policy) for part in parts)))
    stages = [pipelining.PipelineStage(part, n, world * chunks, torch.device("cpu")) for n, part in zip(numbers, parts, strict=True)]
    kind = getattr(pipelining, schedule, None) or getattr(pipelining.schedules, schedule)
    runner = kind(stages[0] if chunks == 1 else stages, MICRO_BATCHES, loss_fn=_loss)
    torch.manual_seed(7)
    seen = []
    for _ in range(2):  # the first also finds out, by a run of its own, what stages send each other
        replays = Replays()
        with observed(replays):
            x, y = torch.randn(2, MICRO_BATCHES, 5, WIDTH)
            losses = []
            runner.step(*([x] if 0 in numbers else []), **({"target": y, "losses": losses} if world * chunks - 1 in numbers else {}))
            seen += [*(loss.detach() for loss in losses), *(g for part in parts for g in gradients(part.parameters()))]
    assert replays.replays == replays.calls == (0 if policy is None else 2 * chunks * MICRO_BATCHES)
    return seen, handles


def case_gpipe():
    same_as_plain(lambda policy: _train(policy, "ScheduleGPipe"))


def case_one_forward_one_backward():
    same_as_plain(lambda policy: _train(policy, "Schedule1F1B"))


def case_interleaved():
    same_as_plain(lambda policy: _train(policy, "ScheduleInterleaved1F1B", 2))


def case_zero_bubble():
    same_as_plain(lambda policy: _train(policy, "ScheduleInterleavedZeroBubble", 2))


def case_zero_bubble_in_a_v():
    same_as_plain(lambda policy: _train(policy, "ScheduleZBVZeroBubble", 2))


def case_two_way_pipeline():
    same_as_plain(lambda policy: _train(policy, "ScheduleDualPipeV", 2))
