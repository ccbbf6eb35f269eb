"""Each preset held to its published meaning: which results are kept, counted on small models, and that replays do not make them again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowtide.errors import InvalidInputError, PolicyError
from lowtide.plan import simulate
from lowtide.policy import apply, attention, cheap, full, megatron_full, parse_policy, selective, torchtitan
from lowtide.trace import trace

from ._models import (
    Block,
    Convolutions,
    MoE,
    Stack,
    SwiGLU,
    by_hand,
    decided,
    inputs,
    kept_in,
    llama,
    moe,
    ops_in_backward,
)

PRODUCTS = [
    "attention.wq linear",
    "attention.wk linear",
    "attention.wv linear",
    "attention.wo linear",
    "mlp.w1 linear",
    "mlp.w3 linear",
    "mlp.w2 linear",
]
FUSED = "attention scaled_dot_product_attention"
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def replayed(model, policy):
    """How often each op runs in backward beyond the plain step's."""
    return Counter(ops_in_backward(model, policy)) - Counter(ops_in_backward(model, "none"))


@pytest.mark.parametrize("policy", ["full", "nothing_saveable", "sqrt", "every:1"])
def test_what_keeps_nothing_recomputes_every_block(policy):
    assert kept_in(llama(), policy) == []
    again = replayed(llama(), policy)
    assert again[FLASH] == again["aten.silu.default"] == 2
    assert again["aten.native_layer_norm.default"] == 4


def test_attention_keeps_the_results_of_attention_only():
    assert kept_in(llama(), "attention") == [FUSED]
    again = replayed(llama(), "attention")
    assert again[FLASH] == 0
    assert again["aten.silu.default"] == 2


def test_attention_keeps_multihead_attention_whole():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = Stack(layer, nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    assert kept_in(model, "attention") == ["self_attn multi_head_attention_forward"]


class Unfused(nn.Module):
    """On a CPU, dropout has attention run as products and a softmax."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x = self.inner(x)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


@pytest.mark.parametrize("policy", ["selective", "dots_saveable", "dots_with_no_batch_dims_saveable", "torchtitan"])
def test_attention_that_is_not_fused_is_no_product(policy):
    """Keeping it would hold its matrix."""
    assert kept_in(Stack(Unfused(), Unfused()), policy) == ["inner linear"]
    with pytest.raises(PolicyError, match=r"attention\(\) matched nothing"):
        ops_in_backward(Stack(Unfused(), Unfused()), "attention")


def test_selective_keeps_products_attention_and_convolutions():
    assert sorted(kept_in(llama(), "selective")) == sorted([*PRODUCTS, FUSED])
    assert kept_in(Convolutions(), "selective") == ["0 conv1d", "3 conv1d"]
    again = replayed(llama(), "selective")
    assert again["aten.mm.default"] == again[FLASH] == 0
    assert again["aten.silu.default"] == 2


def test_torchtitan_keeps_attention_and_every_second_product():
    assert kept_in(llama(), "torchtitan", block=1) == [PRODUCTS[0], PRODUCTS[2], FUSED, PRODUCTS[4], PRODUCTS[6]]
    again = replayed(llama(), "torchtitan")
    assert again["aten.mm.default"] == 2 * 3
    assert again[FLASH] == 0


def test_torchtitan_counts_products_with_biases_as_well():
    assert kept_in(by_hand(), "torchtitan") == ["attention.qkv linear", "mlp.w1 linear", "mlp.w2 linear"]


def test_torchtitan_recomputes_the_router_and_does_not_count_it():
    """The fifth product of the block would be kept, were it not the router's; the one after it is."""
    kept = kept_in(moe(), "torchtitan")
    assert "moe.router.gate linear" not in kept
    assert kept[:4] == [PRODUCTS[0], PRODUCTS[2], FUSED, "moe.router topk"]
    assert kept[4:6] == ["moe.shared_experts.w1 linear", "moe.shared_experts.w2 linear"]


def test_torchtitan_recomputes_what_it_is_told():
    assert kept_in(llama(), torchtitan("**.wq", "**.w1")) == [PRODUCTS[1], FUSED, PRODUCTS[3], PRODUCTS[6]]
    with pytest.raises(PolicyError, match=r"wz.* did you mean .*w"):
        decided(llama(), torchtitan("**.wz"))


def test_dots_saveable_keeps_products_with_batch_dimensions_and_without():
    kept = kept_in(by_hand(), "dots_saveable")
    assert Counter(name.split()[-1] for name in kept) == {"linear": 5, "matmul": 2}
    assert kept_in(llama(), "dots_saveable") == PRODUCTS
    assert [name.split()[-1] for name in kept_in(Convolutions(), "dots_saveable")] == ["conv1d", "conv1d"]
    assert replayed(by_hand(), "dots_saveable")["aten.bmm.default"] == 0


def test_dots_with_no_batch_dims_saveable_keeps_products_with_weights():
    kept = kept_in(by_hand(), "dots_with_no_batch_dims_saveable")
    assert Counter(name.split()[-1] for name in kept) == {"linear": 5}
    again = replayed(by_hand(), "dots_with_no_batch_dims_saveable")
    assert again["aten.bmm.default"] == 4
    assert again["aten.addmm.default"] == 0
    with pytest.raises(PolicyError, match="dots_with_no_batch_dims_saveable"):
        ops_in_backward(Convolutions(), "dots_with_no_batch_dims_saveable")


def test_everything_saveable_recomputes_nothing():
    assert all(kept for site, kept in decided(llama(), "everything_saveable") if site.level == "function")
    assert set(replayed(llama(), "everything_saveable")) <= {"aten.detach.default"}


def test_policies_by_name():
    assert kept_in(llama(), "save_only_these_names:mixed") == [FUSED]
    assert kept_in(by_hand(), "save_only_these_names:scores") == ["attention softmax"]
    assert kept_in(by_hand(), "save_any_names_but_these:scores") == []
    everything, all_but = kept_in(by_hand(), "everything_saveable"), kept_in(by_hand(), "save_anything_except_these_names:scores")
    assert [name for name in everything if name not in all_but] == ["attention softmax"]
    assert replayed(by_hand(), "save_anything_except_these_names:scores")["aten._softmax.default"] == 2


def regions(model, policy):
    handle = apply(model, policy)
    names = list(handle.regions)
    handle.remove()
    return names


def test_megatron_recomputes_layers():
    model = llama(5)
    assert regions(model, megatron_full()) == [f"blocks.{i}" for i in range(5)]
    assert regions(model, "megatron_block:2") == ["blocks.0", "blocks.1"]
    assert regions(model, "megatron_uniform:2") == ["blocks.0 … blocks.1", "blocks.2 … blocks.3", "blocks.4"]
    assert replayed(llama(4), "megatron_block:1")[FLASH] == 1
    for wrong in (("uniform", None), (None, 2), ("other", 2)):
        with pytest.raises(InvalidInputError, match="method"):
            megatron_full(*wrong)


@pytest.mark.parametrize(
    ("parts", "model", "expected"),
    [
        ("core_attn", llama, {FLASH: 2}),
        ("core_attn", by_hand, {"aten.bmm.default": 4, "aten._softmax.default": 2}),
        ("mlp", llama, {"aten.silu.default": 2, "aten.mm.default": 4}),
        ("layernorm", llama, {"aten.native_layer_norm.default": 4}),
        ("core_attn+layernorm", llama, {FLASH: 2, "aten.native_layer_norm.default": 4}),
        ("core_attn+layernorm", by_hand, {"aten.bmm.default": 4, "aten._softmax.default": 2, "aten.native_layer_norm.default": 4}),
        ("shared_experts", moe, {"aten.silu.default": 2, "aten.mm.default": 4}),
        ("moe_act", moe, {"aten.silu.default": 8}),
        ("moe", moe, {"aten.silu.default": 10, "aten._softmax.default": 2, "aten.mm.default": 32}),
    ],
)
def test_megatron_recomputes_parts(parts, model, expected):
    """Of what is named here nothing else is computed again; of a product at the end of a part the inputs are enough."""
    again = replayed(model(), f"megatron_selective:{parts}")
    of_interest = {FLASH, "aten.bmm.default", "aten.mm.default", "aten.addmm.default", "aten.silu.default", "aten._softmax.default"}
    assert {name: count for name, count in again.items() if name in of_interest | {"aten.native_layer_norm.default"}} == expected


def test_megatron_knows_a_mixture_of_experts_by_its_experts():
    model = Stack(Block(inner=MoE, name="mlp"), Block(inner=SwiGLU, name="mlp"))
    assert regions(model, "megatron_selective:moe") == ["blocks.0.mlp"]
    assert regions(model, "megatron_selective:mlp") == ["blocks.1.mlp"]
    assert regions(model, "megatron_selective:mlp+moe+shared_experts") == ["blocks.1.mlp", "blocks.0.mlp"]


def test_megatron_says_what_is_missing():
    for parts in ("moe", "mla_up_proj", "shared_experts+layernorm"):
        with pytest.raises(PolicyError, match=r"no module of that kind \(looked for"):
            apply(llama(), f"megatron_selective:{parts}")


def test_cheap_recomputes_less_than_its_share():
    model, x = by_hand(), inputs()
    found = trace(model, lambda: model(x).backward())
    before, peaks = simulate(found, None), []
    for share in (0.02, 0.5):
        plan = cheap(found, share, time_limit_s=4.0)
        after = simulate(found, plan)
        assert after.replay_s <= share * before.step_s
        peaks.append(after.peak_bytes)
    assert before.peak_bytes >= peaks[0] >= peaks[1]
    assert peaks[1] < before.peak_bytes
    with pytest.raises(InvalidInputError, match="between 0 and 1"):
        cheap(found, 0)


class Always(nn.Module):
    """What every preset keeps, and one thing that none but those that keep all does."""

    def __init__(self, group):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.inner = nn.Linear(8, 8)
        self.group = group

    def forward(self, x):
        scale = (x.abs().max() + x.abs().amax((1, 2), keepdim=True)).clamp_min(1.0)
        x = x / scale @ self.weight
        x = dist._functional_collectives.all_reduce(x, "sum", self.group)
        values, _ = x.topk(4, -1)
        order = x.argsort(-1)
        return torch.sigmoid(self.inner(x)) * values.sum(-1, keepdim=True) + order * x.detach().sum().cpu() * 0.1


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # of torch, about the group
@pytest.mark.parametrize(
    "policy", ["full", "selective", "torchtitan", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable", "sqrt"]
)
def test_every_preset_keeps_communication_routing_and_statistics(group, policy):
    model = Stack(Always(group), Always(group))
    kept = [op for site, is_kept in decided(model, policy) if is_kept for op in map(str, site.ops)]
    recomputed = [op for site, is_kept in decided(model, policy) if not is_kept and site.level == "function" for op in map(str, site.ops)]
    for name in ("_c10d_functional.all_reduce.default", "aten.topk.default", "aten.max.default", "aten.amax.default", "aten.sort.default"):
        assert name in kept, (name, kept)
        assert name not in recomputed
    assert "aten.sigmoid.default" in recomputed


class OffDevice(nn.Module):
    """The meta device stands for one that is not here: what is made of its tensors in host memory has to wait for it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        there = torch.empty(x.shape, device="meta")
        return self.inner(x + torch.zeros_like(there, device="cpu"))


def test_every_preset_keeps_what_is_copied_to_the_host():
    found = decided(Stack(OffDevice(), OffDevice()), "full")
    assert [(site.function.__name__, kept) for site, kept in found if site.level == "function"].count(("zeros_like", True)) == 2
    assert sum(kept for _, kept in found) == 2


@pytest.mark.parametrize("policy", [full(), attention(), selective()], ids=repr)
def test_presets_are_known_by_name(policy):
    assert parse_policy(policy.name) == policy
