"""A U-Net of diffusers: skip connections between blocks, cross attention, a time embedding beside the sample."""

from __future__ import annotations

import functools

import pytest
import torch

import lowtide

from ._families import same, seed
from ._libraries import OTHERS_WARNINGS, library

diffusers = library("diffusers")
pytestmark = pytest.mark.filterwarnings(*OTHERS_WARNINGS)

DOWN, UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")


def unet():
    seed(0)
    widths = {"block_out_channels": (16, 32), "cross_attention_dim": 16, "attention_head_dim": 4, "norm_num_groups": 4}
    shape = {"sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "dropout": 0.1}
    return diffusers.UNet2DConditionModel(down_block_types=DOWN, up_block_types=UP, **widths, **shape).train()


def train(model):
    seen = []
    for step in range(3):
        seed(step)
        model.zero_grad()
        noise, prompt = torch.randn(2, 3, 8, 8), torch.randn(2, 5, 16)
        loss = model(noise, torch.tensor([3, 7]), encoder_hidden_states=prompt).sample.square().mean()
        loss.backward()
        seen += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters()), torch.get_rng_state()]
    return seen


@functools.cache
def plain():
    return train(unet())


def test_replayed_blocks_change_no_bit():
    model = unet()
    kinds = (*DOWN, *UP, "UNetMidBlock2DCrossAttn")
    handle = lowtide.apply(model, lowtide.policy.by_layer_type(dict.fromkeys(kinds, lowtide.policy.full())))
    assert len(handle.regions) == 5
    assert same(train(model), plain())
    assert handle.replay_seconds() > 0


def test_blocks_are_found_without_being_named():
    model = unet()
    handle = lowtide.apply(model, "full")
    assert same(train(model), plain())
    assert handle.replay_seconds() > 0


def test_its_own_checkpointing_runs_on_this_engine():
    model = unet()
    with lowtide.torch_compat.substituted():
        model.enable_gradient_checkpointing()
        assert same(train(model), plain())
