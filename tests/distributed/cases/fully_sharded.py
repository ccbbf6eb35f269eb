"""Parameters that are whole only while they are used. Counted: how often which module is gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from _training import Block, Model, apply, batch, descend, gradients, same_as_plain, seed
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lowtide.policy import by_layer_type, full


@contextmanager
def gathered() -> Iterator[list[str]]:
    """The modules whose parameters are gathered, in order."""
    names: list[str] = []
    gather, unshard, began = param_group.foreach_all_gather, param_group.FSDPParamGroup.unshard, []

    def noting_gather(*args, **kwargs):
        began.append(True)
        return gather(*args, **kwargs)

    def noting_unshard(self, *args, **kwargs):
        before = len(began)
        unshard(self, *args, **kwargs)
        names.extend([self._module_fqn or "(root)"] * (len(began) - before))

    param_group.foreach_all_gather, param_group.FSDPParamGroup.unshard = noting_gather, noting_unshard
    try:
        yield names
    finally:
        param_group.foreach_all_gather, param_group.FSDPParamGroup.unshard = gather, unshard


def _shard(model, **options):
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _train(policy, *, first=True, prepare=None, model=Model, steps=3, **options):
    torch.manual_seed(0)
    module = model()
    if prepare is not None:
        prepare(module)
    handle = apply(module, policy) if first else None
    _shard(module, **options)
    handle = handle if first else apply(module, policy)
    seed()
    seen = []
    with gathered() as names:
        for _ in range(steps):
            names.clear()
            module(batch()).float().square().mean().backward()
            seen += gradients(module.parameters())
            descend(module.parameters())
    assert names == [*_FORWARD, *_BACKWARD], names
    return seen, handle


_FORWARD = ["(root)", "blocks.0", "blocks.1", "blocks.2"]
_BACKWARD = ["blocks.2", "blocks.1", "blocks.0"]


def case_regions_then_sharding():
    """Replays gather nothing that backward would not have gathered."""
    same_as_plain(_train)


def case_sharding_then_regions():
    same_as_plain(lambda policy: _train(policy, first=False))


def case_frozen_parameters():
    def freeze(model):
        model.first.requires_grad_(False)
        for name, parameter in model.blocks.named_parameters():
            parameter.requires_grad_("qkv" in name)

    same_as_plain(lambda policy: _train(policy, prepare=freeze))


def case_mixed_precision():
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    same_as_plain(lambda policy: _train(policy, mp_policy=precision))
    same_as_plain(lambda policy: _train(policy, first=False, mp_policy=precision))


def case_offloaded_to_the_cpu():
    same_as_plain(lambda policy: _train(policy, offload_policy=CPUOffloadPolicy(pin_memory=False)))


def case_accumulation_without_synchronising():
    def train(policy):
        torch.manual_seed(0)
        model = Model()
        handle = apply(model, policy)
        _shard(model)
        seed()
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model(batch()).square().mean().backward()
        return gradients(model.parameters()), handle

    same_as_plain(train)


class Pair(nn.Sequential):
    """Two blocks that are sharded one by one, and a region together."""


def case_a_region_around_sharded_blocks():
    """The replay finds its last block gathered for backward, and leaves the first one whole for the backward that comes next."""

    def train(policy):
        torch.manual_seed(0)
        model = Model(0)
        model.blocks = nn.Sequential(Pair(Block(), Block()), Pair(Block(), Block()))
        handle = apply(model, policy)
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for pair in model.blocks:
            for block in pair:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        seed()
        seen = []
        with gathered() as names:
            for _ in range(3):
                names.clear()
                loss = model(batch()).square().mean()
                forward = len(names)
                loss.backward()
                seen += gradients(model.parameters())
                descend(model.parameters())
        assert Counter(names[forward:]) == {"blocks.1.1": 1, "blocks.1.0": 1, "blocks.0.1": 1, "blocks.0.0": 1}
        return seen, handle

    same_as_plain(train, [by_layer_type({Pair: full()})])


def case_compiled_blocks():
    """Regions, then compiling, then sharding: the compiler replays."""

    def train(policy):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Model()
        handle = apply(model, policy)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        _shard(model)
        seed()
        seen = []
        for _ in range(2):
            model(batch()).square().mean().backward()
            seen += gradients(model.parameters())
        return seen, handle

    same_as_plain(train, ["full"], replays=False)
