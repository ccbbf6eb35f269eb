"""Every policy on every kind of model: losses, gradients and buffers are those of the plain run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import lowtide
from lowtide.policy import (
    both,
    by_layer_type,
    every,
    first_of,
    full,
    inside,
    keep,
    limit_bytes,
    one_in,
    only,
    op,
    recompute,
    segments,
    size,
    skip_last,
)
from lowtide.records import Decision
from lowtide.workload import Workload
from lowtide.workloads import bundled

from ._models import moe


def _moe() -> Workload:
    model = moe()

    def step():
        model.zero_grad()
        loss = model(torch.randn(2, 5, 8))
        loss.backward()
        return loss.detach()

    return Workload(model, step)


MAKERS: dict[str, Callable[[], Workload]] = {
    "gpt": partial(bundled, "gpt", blocks=3, width=16, heads=2, context=16, batch=2, dropout=0.0, corpus_bytes=20_000),
    "gpt, dropout": partial(bundled, "gpt", blocks=2, width=16, heads=2, context=16, batch=2, corpus_bytes=20_000),
    "resnet": partial(bundled, "resnet", widths=(4, 8), depths=(1, 2), batch=4, dataset=20),
    "unet": partial(bundled, "unet", widths=(4, 8, 8), batch=4, dataset=20),
    "moe": _moe,
}
# One matcher, any part of which may match: models differ in what they have.
DEAR = ~(size(at_most=1) | ~op("F.linear", "torch.conv2d", "F.conv_transpose2d", "F.scaled_dot_product_attention"))
NAMED = (
    "full",
    "every:2",
    "skip_last:1",
    "sqrt",
    "selective",
    "dots_saveable",
    "everything_saveable",
    "nothing_saveable",
    "megatron_uniform:2",
    "megatron_block:1",
    "megatron_selective:layernorm",
)
TRANSFORMERS = (
    "attention",
    "torchtitan",
    "dots_with_no_batch_dims_saveable",
    "megatron_selective",
    "megatron_selective:core_attn+layernorm",
    "megatron_selective:core_attn+mlp",
    "megatron_selective:moe+shared_experts+moe_act",
    "save_only_these_names:mixed",
    "save_anything_except_these_names:mixed",
)
ONLY_OF = {"gpt": ("core_attn+mlp",), "moe": ("moe+shared", "_names:")}


def _of_size(site):
    return Decision.KEEP if site.output_bytes > 1000 else Decision.RECOMPUTE


COMBINED = {
    "first_of": first_of(recompute(size(at_most="32KiB")), keep(DEAR)),
    "both": both(keep(DEAR), keep(size(at_least=100))),
    "limit_bytes": limit_bytes(keep(DEAR), "8KiB"),
    "every, one_in": every(2, one_in(2, keep(DEAR))),
    "only, segments": only(segments(2, keep(DEAR)), fraction=0.5),
    "skip_last": skip_last(1, _of_size),
}


def _named_for(model: str) -> list[str]:
    if model not in ONLY_OF:
        return list(NAMED)
    others = [part for kind, parts in ONLY_OF.items() if kind != model for part in parts]
    return [*NAMED, *(policy for policy in TRANSFORMERS if not any(part in policy for part in others))]


CASES = [(model, policy) for model in MAKERS for policy in [*_named_for(model), _of_size]]


def _run(model: str, policy: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    workload = MAKERS[model]()
    handle = None if policy is None else lowtide.apply(workload.model, policy)
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        seen.append(workload.step())
        seen += [parameter.grad.clone() for parameter in workload.model.parameters()]
    if handle is not None:
        assert handle.replay_seconds() > 0
        handle.remove()
    return [*seen, *(buffer.clone() for buffer in workload.model.buffers()), torch.get_rng_state()]


@pytest.fixture(scope="module")
def as_plain():
    """``as_plain(model, policy)`` fails unless every bit is that of the plain run. Nothing outlives this file: others measure."""
    plain: dict[str, list[torch.Tensor]] = {}

    def check(model: str, policy: object) -> None:
        if model not in plain:
            plain[model] = _run(model, None)
        for index, (found, expected) in enumerate(zip(_run(model, policy), plain[model], strict=True)):
            assert torch.equal(found, expected), index

    yield check
    plain.clear()


@pytest.mark.parametrize(("model", "policy"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_gradients_are_those_of_the_plain_run(as_plain, model, policy):
    as_plain(model, policy)


@pytest.mark.parametrize("model", MAKERS)
@pytest.mark.parametrize("kind", COMBINED)
def test_gradients_under_combined_policies(as_plain, model, kind):
    as_plain(model, COMBINED[kind])


def test_gradients_with_policies_by_layer_type(as_plain):
    as_plain("gpt", by_layer_type({"Attention": keep(DEAR), nn.GELU: full()}))


def test_gradients_with_rules_about_modules(as_plain):
    as_plain("moe", first_of(recompute(inside("**.router")), keep(inside("**.experts.*") & op("F.linear"))))
