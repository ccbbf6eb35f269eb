"""Which modules are a model's blocks, and which of them a policy chooses."""

from __future__ import annotations

import pytest
from torch import nn

from lowtide.errors import PolicyError
from lowtide.policy import apply, blocks, by_layer_type, every, full, keep, megatron_full, only, op, segments, skip_last, sqrt
from lowtide.workloads import bundled


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)


class Block(nn.Module):
    def __init__(self, experts: int = 0):
        super().__init__()
        self.attn, self.norm = Attention(), nn.LayerNorm(4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4)) for _ in range(experts))


class Decoder(nn.Module):
    """Two attentions of one class are no blocks, though they are most of the layer."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = Attention(), Attention()


class Stage(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.down = nn.Linear(4, 4)


class Mixture(nn.Module):
    """Experts in a list that is not called so."""

    def __init__(self):
        super().__init__()
        self.attn, self.router = Attention(), nn.Linear(4, 4)
        self.ffns = nn.ModuleList(nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4)) for _ in range(4))


class Model(nn.Module):
    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def stack(*layers: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(layers)


SHARED = Block()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(embed=nn.Embedding(3, 4), layers=stack(Block(), Block()), head=nn.Linear(4, 3)), ["layers.0", "layers.1"]),
        (Model(layers=stack(*(Block(experts=8) for _ in range(2)))), ["layers.0", "layers.1"]),
        (Model(layers=stack(*(Mixture() for _ in range(3)))), ["layers.0", "layers.1", "layers.2"]),
        (Model(stages=stack(Stage(2), Stage(2))), [f"stages.{stage}.blocks.{block}" for stage in range(2) for block in range(2)]),
        (Model(layers=stack(Decoder(), Decoder())), ["layers.0", "layers.1"]),
        (
            Model(encoder=Stage(2), decoder=Model(layers=stack(Decoder(), Decoder()))),
            ["encoder.blocks.0", "encoder.blocks.1", "decoder.layers.0", "decoder.layers.1"],
        ),
        (Model(stages=stack(Stage(1), Stage(2))), ["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"]),
        (
            Model(layers=stack(stack(Attention(), Block()), stack(Attention(), Block()))),
            ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"],
        ),
        (Model(first=Block(), second=Block()), ["first", "second"]),
        (Model(layers=stack(Block())), ["layers.0"]),
        (Model(layers=stack(SHARED, SHARED, SHARED)), ["layers.0"]),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []),
    ],
    ids=[
        "transformer",
        "experts",
        "experts by another name",
        "stages that are alike",
        "two attentions",
        "encoder and decoder",
        "stages",
        "lists in a list",
        "attributes",
        "one",
        "shared",
        "none",
    ],
)
def test_blocks_are_found(model, expected):
    assert list(blocks(model)) == expected


def test_blocks_of_bundled_workloads():
    assert blocks(bundled("gpt", blocks=3, width=8, heads=2).model) == ("blocks.0", "blocks.1", "blocks.2")
    assert len(blocks(bundled("resnet", widths=(4, 8), depths=(1, 2), batch=2).model)) == 3
    assert blocks(bundled("unet", widths=(4, 8, 8), batch=2).model) == ("down.0", "down.1", "bottom", "up.0", "up.1")


SIX = Model(layers=stack(*(Block() for _ in range(6))))


def numbers(policy):
    """The layers of each region, by number."""
    return [tuple(int(path.rpartition(".")[2]) for path in region.paths) for region in policy.regions(SIX)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (full(), [0, 1, 2, 3, 4, 5]),
        (keep(op("aten.mm")), [0, 1, 2, 3, 4, 5]),
        (every(2), [0, 2, 4]),
        (every(9), [0]),
        (skip_last(2), [0, 1, 2, 3]),
        (only(first=2), [0, 1]),
        (only(last=2), [4, 5]),
        (only(middle=2), [2, 3]),
        (only(middle=3), [1, 2, 3]),
        (only(first=9), [0, 1, 2, 3, 4, 5]),
        (only(fraction=0.5), [0, 2, 4]),
        (only(fraction=0.33), [0, 3]),
        (only(fraction=1), [0, 1, 2, 3, 4, 5]),
        (every(2, skip_last(1)), [0, 2, 4]),
        (skip_last(1, every(2)), [0, 2]),
        (megatron_full("block", 2), [0, 1]),
        (megatron_full(), [0, 1, 2, 3, 4, 5]),
    ],
    ids=repr,
)
def test_policies_choose_blocks(policy, expected):
    assert numbers(policy) == [(number,) for number in expected]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (segments(4), [(0, 1, 2, 3), (4, 5)]),
        (sqrt(), [(0, 1, 2), (3, 4, 5)]),
        (megatron_full("uniform", 2), [(0, 1), (2, 3), (4, 5)]),
        (skip_last(1, segments(2)), [(0, 1), (2, 3)]),
        (segments(2, every(2)), [(0, 2), (4,)]),
    ],
    ids=repr,
)
def test_policies_make_segments(policy, expected):
    assert numbers(policy) == expected


def test_segments_stay_within_a_list():
    regions = sqrt().regions(Model(stages=stack(Stage(3), Stage(1))))
    assert [region.paths for region in regions] == [
        ("stages.0.blocks.0", "stages.0.blocks.1"),
        ("stages.0.blocks.2",),
        ("stages.1.blocks.0",),
    ]


def test_layers_have_policies_by_type():
    attention, whole = keep(op("aten.mm")), full()
    regions = by_layer_type({Attention: attention, "Decoder": whole}).regions(Model(layers=stack(Block(), Decoder())))
    assert [(region.paths, region.policy) for region in regions] == [(("layers.0.attn",), attention), (("layers.1",), whole)]


def test_a_type_that_is_not_there_is_named():
    with pytest.raises(PolicyError, match="no module of class Atention: did you mean Attention"):
        apply(SIX, by_layer_type({"Atention": full()}))


def test_a_model_without_blocks_is_told_so():
    with pytest.raises(PolicyError, match="nothing repeats in Sequential"):
        apply(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "full")


def test_segments_of_segments_are_refused():
    with pytest.raises(PolicyError, match="makes segments already"):
        segments(2, sqrt()).regions(SIX)


@pytest.mark.parametrize("count", [3, 99])
def test_leaving_out_every_block_is_refused_with_their_number(count):
    model = Model(layers=stack(Block(), Block(), Block()))
    with pytest.raises(PolicyError, match=r"skip_last\(\d+, .*\) leaves no region to replay: .* makes 3 in this model"):
        apply(model, f"skip_last:{count}")
    apply(model, "skip_last:2").remove()
