"""How often parameters are gathered, with a region and without one, beside what ``simulate`` says of the rewritten trace of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _training import WIDTH, Block, Model, batch, gradients
from _worker import load
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.distributed import GatherCost, measure_gather, on_ranks
from lowtide.plan import Plan, PlannedRegion
from lowtide.policy import fingerprint

PRICE_S = 7.0
"""Of every gather, in the rewritten trace."""


class Embedded(nn.Module):
    """Tokens that are looked up in front of blocks: backward needs no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(16, WIDTH), nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.blocks(self.tokens(x))


class Around(nn.Module):
    """Something before and after what may be one region."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.last = inside, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.inside(x))


def _counted(make, x, units, regions, forward_only, zero):
    """Gathers of a step on this process, and its gradients."""
    torch.manual_seed(0)
    model = make()
    if regions:
        lowtide.apply(model, Plan(regions, fingerprint(model), 0, 0, 0.0, 0.0, "hand"))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    modules = dict(model.named_modules())
    for unit in units:
        fully_shard(modules[unit], mesh=mesh, reshard_after_forward=zero == 3)
    for unit in forward_only:
        modules[unit].set_unshard_in_backward(False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    with load("fully_sharded").gathered() as names:
        for _ in range(2):
            names.clear()
            model.zero_grad()
            torch.manual_seed(5)
            model(x).square().mean().backward()
    return len(names), gradients(model.parameters())


def _predicted(make, x, units, regions, forward_only, zero):
    """What a plan adds, by ``simulate``."""
    torch.manual_seed(0)
    model = make()
    traced = lowtide.trace(model, lambda: model(x).square().mean().backward())
    cost = GatherCost(PRICE_S, 0.0)
    return lowtide.simulate(on_ranks(traced, dist.get_world_size(), zero, units, forward_only=forward_only, gather=cost), regions)


def _agree(expected, make, units, *paths, forward_only=(), zero=3, x=None):
    x = batch() if x is None else x
    regions = tuple(PlannedRegion((path,) if isinstance(path, str) else path) for path in paths)
    settings = units, regions, forward_only, zero
    found, with_regions = _counted(make, x, *settings)
    plain, without = _counted(make, x, units, (), forward_only, zero)
    predicted = _predicted(make, x, *settings)
    assert predicted.replay_s > 0
    assert found - plain == predicted.gathers == expected, (found, plain, predicted.gathers, expected)
    assert predicted.gather_s == PRICE_S * expected
    assert all(torch.equal(one, other) for one, other in zip(with_regions, without, strict=True))


def _blocks(count):
    return [f"blocks.{block}" for block in range(count)]


def case_what_is_sharded_is_a_region():
    _agree(0, Model, _blocks(3), *_blocks(3))


def case_regions_inside_of_what_is_sharded():
    _agree(0, Model, _blocks(3), *(f"{block}.dropout" for block in _blocks(3)), *(f"{block}.up" for block in _blocks(3)), "blocks.0.norm")


def case_a_region_around_all_that_is_sharded():
    """Each is gathered in the replay in place of backward."""
    _agree(0, Model, _blocks(3), "blocks")


def case_blocks_that_a_plan_joins():
    """What is gathered one by one is replayed one by one: each finds its parameters whole."""
    _agree(0, Model, _blocks(3), ("blocks.0", "blocks.1", "blocks.2"))
    _agree(0, Model, _blocks(3), ("first", "blocks.0.attention_norm"), ("blocks.1", "blocks.2.attention_norm"))


def case_sharded_inside_of_sharded():
    units = [path for block in _blocks(3) for path in (f"{block}.qkv", f"{block}.up", block)]
    _agree(0, Model, units, *_blocks(3))


def case_parameters_that_stay_whole():
    _agree(0, Model, _blocks(3), "blocks", zero=2)


def case_an_embedding_that_backward_does_not_gather():
    tokens = torch.randint(16, (2, 5))
    units = ["inside.tokens", "inside.blocks.0", "inside.blocks.1"]
    _agree(0, lambda: Around(Embedded()), units, *units[1:], forward_only=units[:1], x=tokens)
    _agree(1, lambda: Around(Embedded()), units, "inside", forward_only=units[:1], x=tokens)


def case_frozen_blocks_that_no_gradient_reaches():
    """Backward gathers the last of them ahead, in vain; a replay from the first on gathers the two before it as well."""

    def frozen():
        model = Around(nn.Sequential(*(Block() for _ in range(4))))
        for block in model.inside[:3]:
            block.requires_grad_(False)
        return model

    units = [f"inside.{block}" for block in range(4)]
    _agree(0, frozen, units, units[3])
    _agree(2, frozen, units, "inside")


def case_the_bandwidth_is_measured():
    cost = measure_gather(rounds=2)
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, cost)
    assert set(found) == {cost}, found  # all processes have the same figures
    assert cost.latency_s >= 0
    assert cost.s_per_byte >= 0
    assert cost.latency_s + cost.s_per_byte > 0
