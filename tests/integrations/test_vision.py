"""Models of timm and torchvision: batch norm, stochastic depth, stages of different width. Steps are the plain ones bit for bit."""

from __future__ import annotations

import functools

import pytest
import torch

import lowtide

from ._libraries import OTHERS_WARNINGS, library

timm = library("timm", "test-vision")
torchvision = library("torchvision", "test-vision")
pytestmark = pytest.mark.filterwarnings(*OTHERS_WARNINGS)


def _timm(name, **options):
    return timm.create_model(name, num_classes=5, drop_path_rate=0.2, **options)


def _timm_vit():
    drop = {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1}
    return _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4, **drop)


def _torchvision_vit():
    vit = torchvision.models.vision_transformer.VisionTransformer
    return vit(32, 8, num_layers=4, num_heads=4, hidden_dim=32, mlp_dim=48, dropout=0.1, attention_dropout=0.1, num_classes=5)


def _torchvision_convnext():
    block = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.convnext.ConvNeXt([block(16, 32, 2), block(32, None, 2)], stochastic_depth_prob=0.2, num_classes=5)


MODELS = {
    "timm resnet": functools.partial(_timm, "resnet18", channels=(8, 16, 16, 32), drop_block_rate=0.1),
    "timm vit": _timm_vit,
    "timm convnext": functools.partial(_timm, "convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 16, 32)),
    "torchvision resnet": functools.partial(torchvision.models.resnet18, num_classes=5),
    "torchvision vit": _torchvision_vit,
    "torchvision convnext": _torchvision_convnext,
    "torchvision mobilenet": functools.partial(torchvision.models.mobilenet_v3_small, num_classes=5),
}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().train()


def step_of(model):
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 3, 32, 32)).square().mean().backward()
        optimizer.step()

    return step


def train(model):
    step, seen = step_of(model), []
    for number in range(3):
        torch.manual_seed(number)
        step()
        seen += [parameter.grad.clone() for parameter in model.parameters()] + [buffer.clone() for buffer in model.buffers()]
    return [*seen, torch.get_rng_state()]


@functools.cache
def plain(name):
    return train(make(name))


def same(found, expected):
    return len(found) == len(expected) and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("policy", ["full", "every:2", "selective"])
def test_a_policy_changes_no_bit(name, policy):
    model = make(name)
    handle = lowtide.apply(model, policy)
    assert same(train(model), plain(name))
    assert handle.replay_seconds() > 0


@pytest.mark.parametrize("name", ["timm resnet", "timm vit", "timm convnext"], indirect=True)
def test_the_checkpointing_of_timm_runs_on_this_engine(name):
    """Theirs updates the statistics of batch norm twice."""
    model = make(name)
    model.set_grad_checkpointing()
    with lowtide.torch_compat.substituted():
        assert same(train(model), plain(name))


@pytest.mark.parametrize("name", ["torchvision convnext", "torchvision vit"], indirect=True)
def test_a_step_is_fitted_into_a_budget(name):
    model = make(name)
    result = lowtide.fit(model, step_of(model), "80%", rounds=1)
    assert result.verified
    assert result.peak_bytes <= 0.8 * result.traced_peak_bytes
