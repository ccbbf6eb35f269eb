"""The trace of one micro-batch, rewritten for a rank of a pipeline: against a step that plays the schedule, and torch's own orders."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining

import lowtide
from lowtide.distributed import GatherCost, in_pipeline, on_ranks
from lowtide.distributed._schedules import actions, most_in_flight
from lowtide.errors import InvalidInputError
from lowtide.plan import PlannedRegion

WIDTH, ROWS, MICRO_BATCHES = 16, 64, 5


class Block(nn.Sequential):
    """A layer and what it saves."""


def rank_of_pipeline(parts: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(*(Block(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2))) for _ in range(parts)
    )


class Played:
    """A rank's step as the schedule runs it, without the other ranks; it holds what is sent as long as torch's schedules do."""

    def __init__(self, schedule: str, rank: int, ranks: int, micro_batches: int, parts: int = 1) -> None:
        self.schedule, self.rank, self.ranks, self.count = schedule, rank, ranks, micro_batches
        self.order = actions(schedule, rank, ranks, micro_batches, parts)
        self.model = rank_of_pipeline(parts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.received = {(c, k): self._tensor(c > 0 or rank > 0) for c in range(parts) for k in range(micro_batches)}
        self.gradients = {(c, k): self._tensor(False) for c in range(parts) for k in range(micro_batches) if not self.is_last(c)}

    def _tensor(self, requires_grad: bool) -> Tensor:
        return torch.zeros(ROWS, WIDTH, requires_grad=requires_grad)

    def is_last(self, part: int) -> bool:
        return self.rank == self.ranks - 1 and part == len(self.model) - 1

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.play()
        self.optimizer.step()

    def play(self) -> None:
        flying: dict[tuple[int, int], Tensor] = {}
        results: list[Tensor] = []  # sent, or handed back
        gradients: list[Tensor | None] = []
        one_by_one, warm = self.schedule == "1f1b", min(self.ranks - self.rank, self.count)
        for kind, c, k in self.order:
            if kind == "forward":
                out = self.model[c](self.received[c, k])
                flying[c, k] = out.square().sum() if self.is_last(c) else out
                if self.is_last(c) or not one_by_one or k == warm - 2:
                    results.append(out.detach())
                del out
                continue
            flying.pop((c, k)).backward(self.gradients.get((c, k)))
            gradients.append(self.received[c, k].grad)
            self.received[c, k].grad = None
            if one_by_one:
                del gradients[:-1]
            if one_by_one and k == self.count - warm and not self.is_last(c):
                results.clear()


class One(Played):
    """One micro-batch on each part, without a schedule."""

    def play(self) -> None:
        results = [part(self.received[c, 0]) for c, part in enumerate(self.model)]
        if self.is_last(len(self.model) - 1):
            results[-1].square().sum().backward()
        for c in reversed(range(len(results))):
            if not self.is_last(c):
                results[c].backward(self.gradients[c, 0])
        for c in range(len(results)):
            self.received[c, 0].grad = None


CASES = [("gpipe", 1, 3, 1), *(("1f1b", rank, 3, 1) for rank in range(3)), ("interleaved", 0, 2, 2), ("interleaved", 1, 2, 2)]


@pytest.mark.parametrize(("schedule", "rank", "ranks", "parts"), CASES)
def test_a_rewritten_trace_has_the_peak_of_a_step_that_plays_the_schedule(schedule, rank, ranks, parts):
    count = 4 if parts > 1 else MICRO_BATCHES
    paths = [str(part) for part in range(parts)]
    replays = [PlannedRegion((f"{path}.{block}",)) for path in paths for block in range(2)]
    played, one = Played(schedule, rank, ranks, count, parts), One(schedule, rank, ranks, 1, parts)
    expected = lowtide.trace(played.model, played)
    found = in_pipeline(lowtide.trace(one.model, one), rank, ranks, count, schedule, paths)
    for regions in ([], replays):
        peaks = [lowtide.simulate(trace, regions).peak_bytes for trace in (found, expected)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


@pytest.fixture(scope="module")
def traced() -> lowtide.StepTrace:
    one = One("1f1b", 1, 3, 1)
    return lowtide.trace(one.model, one)


def test_what_waits_for_gradients_of_weights_is_held(traced):
    peaks = [lowtide.simulate(in_pipeline(traced, 2, 4, 6, schedule, ["0"]), None).peak_bytes for schedule in ("1f1b", "zero-bubble")]
    saved = sum(traced.storages[i].bytes for i in {s.storage for s in traced.saved} if not traced.storages[i].resident)
    made = (2 * (2 * ROWS * WIDTH + ROWS * WIDTH) - ROWS * WIDTH) * 4  # gradients of four layers' results; the last one's was received
    assert peaks[1] - peaks[0] >= 2 * (saved + made)  # two micro-batches late on rank 2


def test_the_first_stage_goes_backward_once(traced):
    """It needs no gradient of its input: nothing waits there, and replays free what they do under 1F1B."""
    regions = [PlannedRegion((f"0.{block}",)) for block in range(2)]
    freed = []
    for schedule in ("1f1b", "zero-bubble"):
        piped = in_pipeline(traced, 0, 4, 6, schedule, ["0"])
        freed.append(lowtide.simulate(piped, None).peak_bytes - lowtide.simulate(piped, regions).peak_bytes)
    assert freed[1] == freed[0] > 0


def test_a_plan_for_a_rank_of_a_pipeline(traced):
    piped = in_pipeline(traced, 0, 3, MICRO_BATCHES, parts=["0"])
    budget = int(0.75 * lowtide.simulate(piped, None).peak_bytes)
    plan = lowtide.solve(piped, budget)
    assert plan.regions
    assert lowtide.simulate(piped, plan).peak_bytes <= budget


def test_stages_may_be_sharded(traced):
    """What is gathered once for a replay of one micro-batch is gathered for the replay of each."""
    units, regions = ["0.0", "0.1"], [PlannedRegion(("0",))]
    sharded = on_ranks(traced, 2, 3, units, forward_only=units[:1], gather=GatherCost(1.0, 0.0))
    one = lowtide.simulate(sharded, regions)
    piped = lowtide.simulate(in_pipeline(sharded, 1, 3, MICRO_BATCHES, parts=["0"]), regions)
    assert one.gathers == one.gather_s == 1
    assert piped.gathers == piped.gather_s == MICRO_BATCHES
    whole = on_ranks(in_pipeline(traced, 1, 3, MICRO_BATCHES, parts=["0"]), 2, 3, units)
    assert [gather.call for gather in whole.gathers] == sorted(gather.call for gather in whole.gathers)
    assert len(whole.gathers) == MICRO_BATCHES * len(units)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((1, 1, 2, "1f1b"), "rank 1 of 1"),
        ((0, 2, 2, "2f2b"), "2f2b"),
        ((0, 2, 2, "1f1b", ("0", "1")), "interleaved"),
        ((0, 2, 7, "interleaved", ("0.0", "0.1")), "take turns"),
        ((0, 2, 2, "1f1b", ("9",)), "never calls '9'"),
    ],
)
def test_a_pipeline_that_cannot_be(traced, asked, says):
    with pytest.raises(InvalidInputError, match=says):
        in_pipeline(traced, *asked)


@pytest.mark.parametrize(
    ("kind", "schedule"), [("ScheduleInterleaved1F1B", "interleaved"), ("ScheduleInterleavedZeroBubble", "zero-bubble")]
)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (4, 8), (4, 4)])
def test_orders_are_those_of_torch(kind, schedule, ranks, count):
    parts = 2 if schedule == "interleaved" else 1
    runner = object.__new__(getattr(pipelining, kind))  # its order needs no processes
    rounds = max(1, count // ranks)
    vars(runner).update(pp_group_size=ranks, n_local_stages=parts, _n_microbatches=count, microbatches_per_round=count // rounds)
    kinds = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
    for rank in range(ranks):
        order = filter(None, runner._calculate_single_rank_operations(rank))
        theirs = [(kinds[action.computation_type.value], action.stage_index // ranks, action.microbatch_index) for action in order]
        assert [tuple(action) for action in actions(schedule, rank, ranks, count, parts)] == theirs


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_micro_batches_in_flight_are_those_of_the_papers(count):
    for rank in range(4):
        assert most_in_flight(actions("gpipe", rank, 4, count)) == count
        assert most_in_flight(actions("1f1b", rank, 4, count)) == min(4 - rank, count)
        assert most_in_flight(actions("zero-bubble", rank, 4, count)) == min(4, count)
