"""``FullyShardedDataParallel``: one flat parameter for each unit, gathered by hooks of its own and taken apart for the forward."""

from __future__ import annotations

import warnings
from itertools import product

import torch
from _training import Block, Model, batch, descend, gradients, seed
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import lowtide
from lowtide.torch_compat import checkpoint


class _Checkpointed(nn.Module):
    """Calls what is in it as a region."""

    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x):
        return checkpoint(self.inner, x, **self.options)


def _train(inside, around, use_orig_params, steps=3):
    """Train with one unit a block; ``inside`` makes of a block what is the unit, ``around`` of the unit what is called."""
    torch.manual_seed(0)
    model, cpu = Model(), torch.device("cpu")

    def unit(module):
        return FullyShardedDataParallel(module, device_id=cpu, use_orig_params=use_orig_params)

    for index, block in enumerate(model.blocks):
        model.blocks[index] = around(unit(inside(block)))
    module = unit(model)
    seed()
    seen = []
    for _ in range(steps):
        x = batch().requires_grad_()
        module(x).square().mean().backward()
        seen += [x.grad, *gradients(module.parameters())]
        descend(module.parameters())
    return seen


def _as_it_is(module):
    return module


def _checkpointed(use_reentrant):
    return lambda module: _Checkpointed(module, use_reentrant=use_reentrant)


def _region(block):
    assert isinstance(block, Block)
    lowtide.apply(block, lowtide.policy.by_layer_type({Block: lowtide.policy.full()}))
    return block


def _same(inside, around):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that the class is an older one
        for use_orig_params in (False, True):
            expected = _train(_as_it_is, _as_it_is, use_orig_params)
            found = _train(inside, around, use_orig_params)
            assert len(found) == len(expected)
            for index, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(one, other), f"{use_orig_params}: tensor {index} of {len(found)} differs by {(one - other).abs().max()}"


def case_units_called_as_regions():
    """Each replay gathers the unit's parameters, as the forward did."""
    for use_reentrant in (False, True):
        _same(_as_it_is, _checkpointed(use_reentrant))


def case_regions_in_units():
    for use_reentrant in (False, True):
        _same(_checkpointed(use_reentrant), _as_it_is)


def case_regions_on_blocks_then_sharding():
    _same(_region, _as_it_is)


def case_regions_around_and_in_units():
    for one, other in product((False, True), repeat=2):
        _same(_checkpointed(one), _checkpointed(other))
