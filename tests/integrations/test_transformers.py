"""Families of transformers train under a policy, and under their own checkpointing on this engine, as they do plain: bit for bit."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import AlreadyAppliedError, InvalidInputError, MissingExtraError
from lowtide.integrations.transformers import enable, trainer_callback

from ._families import FAMILIES, make, same, seed, train
from ._libraries import OTHERS_WARNINGS, library

library("transformers")
pytestmark = pytest.mark.filterwarnings(*OTHERS_WARNINGS)

BLOCKS = {"t5": 4, "whisper": 4}


def encoder_or_decoder(family):
    """Without a cache: some families compute other bits with one."""
    return {} if family in ("vit", "wav2vec2") else {"use_cache": False}


@functools.cache
def plain(family, attention):
    return train(*make(family, attention, **encoder_or_decoder(family)))


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=["eager", "sdpa"])
def attention(request):
    return request.param


def test_replayed_layers_change_no_bit(family, attention):
    model, batch = make(family, attention, **encoder_or_decoder(family))
    handle = enable(model)
    assert same(train(model, batch), plain(family, attention))
    assert len(handle.regions) == BLOCKS.get(family, 3)
    assert handle.replay_seconds() > 0


@pytest.mark.parametrize("policy", ["every:2", "selective", "dots_saveable"])
def test_other_policies_change_no_bit(family, policy):
    model, batch = make(family, **encoder_or_decoder(family))
    handle = enable(model, policy)
    assert same(train(model, batch), plain(family, "sdpa"))
    assert len(handle.regions) == (2 if policy == "every:2" else BLOCKS.get(family, 3))
    assert handle.replay_seconds() > 0


def switch_on(model):
    """By whichever name the installed release has it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


@pytest.mark.parametrize("switched_on", ["before", "inside"])
def test_their_own_checkpointing_runs_on_this_engine(family, attention, switched_on):
    model, batch = make(family, attention, **encoder_or_decoder(family))
    if switched_on == "before":
        switch_on(model)
    with lowtide.torch_compat.substituted():
        if switched_on == "inside":
            switch_on(model)
        used = {module._gradient_checkpointing_func.func for module in model.modules() if getattr(module, "gradient_checkpointing", False)}
        found = train(model, batch)
    assert used == {lowtide.torch_compat.checkpoint}
    assert same(found, plain(family, attention))


def test_what_a_model_returns_besides_is_unchanged(family):
    model, batch = make(family, "eager", **encoder_or_decoder(family))
    wanted = {"output_hidden_states": True, "output_attentions": True}
    seed(3)
    expected = [*tensors(model(**batch, **wanted).to_tuple())]
    enable(model)
    seed(3)
    assert same([*tensors(model(**batch, **wanted).to_tuple())], expected)


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value.detach()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def test_names_and_classes_stay_as_they_are():
    model, _ = make("llama")
    names, state = [(name, type(module)) for name, module in model.named_modules()], list(model.state_dict())
    handle = enable(model)
    assert [(name, type(module)) for name, module in model.named_modules()] == names
    assert list(model.state_dict()) == state
    handle.remove()
    assert not any("forward" in module.__dict__ or module._forward_pre_hooks for module in model.modules())


def test_both_kinds_of_checkpointing_at_once_are_refused():
    model, _ = make("llama")
    switch_on(model)
    with pytest.raises(AlreadyAppliedError, match="gradient_checkpointing_disable"):
        enable(model)


def test_a_module_without_a_transformers_model_is_refused():
    with pytest.raises(InvalidInputError, match=r"lowtide\.apply"):
        enable(nn.Linear(2, 2))


@pytest.mark.parametrize("function", [lambda: enable(nn.Linear(2, 2)), trainer_callback], ids=["enable", "trainer_callback"])
def test_without_the_library_the_error_says_how_to_install_it(monkeypatch, function):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lowtide\[transformers\]'"):
        function()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "t5"])
def test_a_step_is_fitted_into_a_budget(family):
    model, batch = make(family, use_cache=False)
    batch = {name: value.repeat(8, 3) for name, value in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step():
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    result = lowtide.fit(model, step, "75%", rounds=1)
    assert result.verified
    assert result.peak_bytes <= 0.75 * result.traced_peak_bytes
    assert result.handle.regions
