"""Families of transformers under every preset, held against the plain step by ``lowtide.verify``; the doctor finds them healthy."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.policy._named import ENTRIES
from lowtide.trace import TrainingState
from lowtide.verify import Reference

from ._families import FAMILIES, make
from ._libraries import OTHERS_WARNINGS, library

library("transformers")
pytestmark = pytest.mark.filterwarnings(*OTHERS_WARNINGS)

APPLIED = (
    *("full", "every:2", "skip_last:1", "sqrt", "selective", "attention", "torchtitan"),
    *("megatron_uniform:2", "megatron_block:2", "megatron_selective"),
    *("dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable", "nothing_saveable"),
)
MADE_FROM_A_TRACE = (("llama", "plan:90%"), ("t5", "plan:90%"), ("mixtral", "plan:97%"), ("llama", "cheap"))
READ = ("megatron", "deepspeed")  # settings that come to one of the others
OF_NAMES = ("save_only_these_names", "save_any_names_but_these", "save_anything_except_these_names")


def made(family, times=1):
    model, batch = make(family, times=times, **({} if family in ("vit", "wav2vec2") else {"use_cache": False}))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


@functools.cache
def reference(family):
    """The plain step runs once for all presets."""
    model, step = made(family)
    return model, Reference(model, step, TrainingState(model, step))


@pytest.fixture
def fused(monkeypatch):
    """On a CPU, attention is fused without dropout only."""
    attention = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **options: attention(*args, **{**options, "dropout_p": 0.0}))


@pytest.mark.parametrize("preset", [preset for preset in APPLIED if preset != "attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_presets_change_no_bit(family, preset):
    model, plain = reference(family)
    if (family, preset) == ("t5", "megatron_selective"):  # no module of it is attention alone
        with pytest.raises(lowtide.PolicyError, match="no module of that kind"):
            lowtide.apply(model, preset)
        return
    handle = lowtide.apply(model, preset)
    try:
        found = plain.compare()
        assert handle.replay_seconds() > 0
    finally:
        handle.remove()
    assert found.equal, found.report()
    assert found.repeatable
    assert found.gradients > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_attention_that_is_kept_changes_no_bit(family, fused):
    found = lowtide.verify(*made(family), policy="attention", steps=1)
    assert found.equal, found.report()
    assert found.repeatable


@pytest.mark.parametrize(("family", "preset"), MADE_FROM_A_TRACE)
def test_plans_change_no_bit(family, preset):
    model, step = made(family)
    found = lowtide.verify(model, step, policy=_cheap(model, step) if preset == "cheap" else preset, steps=1)
    assert found.equal, found.report()
    assert found.repeatable


def _cheap(model, step):
    """What is cheap must not depend on the machine: every op takes the same time, next to which the engine's own is nothing."""
    traced = lowtide.trace(model, step)
    return lowtide.policy.cheap(replace(traced, ops=tuple(replace(op, seconds=1e-2) for op in traced.ops)))


@pytest.mark.parametrize("policy", [None, "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_doctor_is_silent_about_families_with_activations_to_replay(family, policy):
    """In batches that are large beside models of this size."""
    found = lowtide.doctor(*made(family, times=8), policy=policy)
    assert found.findings == (), found.report()


def test_the_doctor_says_of_a_small_batch_beside_many_experts_that_they_are_the_peak():
    """Four experts' weights and their gradients, beside 20 tokens: replays find nothing to free at that moment."""
    found = {finding.symptom: finding for finding in lowtide.doctor(*made("mixtral"), policy="full").findings}
    assert set(found) == {"the peak is parameters, gradients and optimizer state", "sequence too short"}
    assert "fully_shard" in found["the peak is parameters, gradients and optimizer state"].mend


def test_no_preset_is_left_out():
    """Those that go by names need a model that gives some."""
    tried = {text.partition(":")[0] for text in (*APPLIED, *(preset for _, preset in MADE_FROM_A_TRACE), *OF_NAMES, *READ)}
    assert tried | {"none"} == {entry.name for entry in ENTRIES}
