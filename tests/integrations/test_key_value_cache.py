"""``use_cache`` where layers are replayed: set off with one warning, unless the cache is an input."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import pytest
import torch
from torch import nn

import lowtide
from lowtide.integrations.transformers import enable

from ._families import WITH_CACHE, make, same, train
from ._libraries import OTHERS_WARNINGS, library

T = library("transformers")
pytestmark = pytest.mark.filterwarnings(*OTHERS_WARNINGS)


def warned(function):
    """What a function returns, and lowtide's warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = function()
    return result, [str(warning.message) for warning in seen if "use_cache" in str(warning.message)]


@functools.cache
def without_cache(family):
    return train(*make(family, use_cache=False))


@pytest.mark.parametrize("family", WITH_CACHE)
def test_the_setting_of_the_model_is_overruled_with_one_warning(family):
    model, batch = make(family)
    assert model.config.use_cache
    enable(model)
    found, told = warned(lambda: train(model, batch))
    assert len(told) == 1
    assert type(model).__name__ in told[0]
    assert same(found, without_cache(family))
    assert model.config.use_cache


@pytest.mark.parametrize("family", ["bert", "vit", "wav2vec2"])
def test_encoders_have_nothing_to_be_warned_of(family):
    model, batch = make(family)
    enable(model)
    assert warned(lambda: train(model, batch, 1))[1] == []


def test_an_argument_is_overruled_too():
    model, batch = make("llama", use_cache=False)
    enable(model)
    result, told = warned(lambda: model(**batch, use_cache=True))
    assert len(told) == 1
    assert result.past_key_values is None


@pytest.mark.parametrize("positional", [False, True])
def test_an_empty_cache_in_the_arguments_is_left_out(positional):
    model, batch = make("gpt2", use_cache=False)
    enable(model)
    cache = T.DynamicCache(config=model.config)
    call = (lambda: model(batch["input_ids"], cache)) if positional else lambda: model(**batch, past_key_values=cache)
    _, told = warned(call)
    assert len(told) == 1
    assert cache.get_seq_length() == 0


def with_prefix(model, batch, policy):
    """A cache that holds what is trained, as prefix tuning passes it."""
    handle = None if policy is None else enable(model, policy)
    prefix = nn.Parameter(torch.linspace(-1, 1, 2 * 2 * 2 * 3 * 8).view(2, 2, 2, 3, 8))
    seen = []
    for _ in range(3):
        model.zero_grad()
        prefix.grad = None
        cache = T.DynamicCache(config=model.config)
        for layer in range(3):
            cache.update(prefix[0] + layer, prefix[1], layer)
        torch.manual_seed(1)
        model(input_ids=batch["input_ids"], labels=batch["labels"], past_key_values=cache).loss.backward()
        seen += [prefix.grad.clone(), *(parameter.grad.clone() for parameter in model.parameters())]
        assert cache.get_seq_length() == 3 + batch["input_ids"].shape[1]
    return seen if handle is None else [*seen, torch.tensor(handle.replay_seconds() > 0)]


@pytest.mark.parametrize("policy", ["full", "every:2"])
def test_a_cache_with_something_in_it_is_an_input_and_ends_as_after_one_forward(policy):
    plain = with_prefix(*make("llama"), None)
    found, told = warned(lambda: with_prefix(*make("llama"), policy))
    assert told == []
    assert same(found, [*plain, torch.tensor(True)])


def test_without_gradients_the_cache_is_there():
    model, batch = make("llama")
    enable(model)
    with torch.no_grad():
        cache = model(batch["input_ids"]).past_key_values
    assert cache.get_seq_length() == batch["input_ids"].shape[1]
    tokens = model.eval().generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, make("llama")[0].eval().generate(batch["input_ids"], max_new_tokens=3, do_sample=False))


def test_it_is_as_before_where_the_policy_is_disabled_or_removed():
    model, batch = make("llama")
    handle = enable(model)
    with handle.disabled():
        assert model(**batch).past_key_values is not None
    handle.remove()
    assert warned(lambda: model(**batch))[0].past_key_values is not None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_copies_have_it_too(duplicate):
    model, batch = make("llama")
    enable(model)
    twin = duplicate(model)
    found, _ = warned(lambda: train(twin, batch))
    assert same(found, without_cache("llama"))


def test_a_fit_is_without_cache_from_its_first_step_on():
    model, batch = make("gpt2")
    batch = {name: value.repeat(8, 3) for name, value in batch.items()}

    def step():
        model.zero_grad()
        model(**batch).loss.backward()

    result, told = warned(lambda: lowtide.fit(model, step, "75%", rounds=1))
    assert result.verified
    assert result.handle.regions
    again, more = warned(lambda: model(**batch))
    assert len(told + more) == 1
    assert again.past_key_values is None


def test_models_without_regions_in_them_are_left_alone():
    decoder, encoder = make("llama")[0], make("bert")[0]
    both = nn.ModuleDict({"decoder": decoder, "encoder": encoder})
    handle = lowtide.apply(both, lowtide.policy.by_layer_type({"BertLayer": lowtide.policy.full()}))
    assert handle.regions
    assert not decoder._forward_pre_hooks
