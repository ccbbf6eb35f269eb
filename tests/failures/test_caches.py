"""A key-value cache that a region appends to is put back for the replay and ends as after one forward."""

from __future__ import annotations

import dataclasses
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide


@dataclasses.dataclass
class _Cache:
    keys: list[torch.Tensor] = dataclasses.field(default_factory=list)
    length: int = 0

    def append(self, keys):
        self.keys.append(keys)
        self.length += keys.shape[1]
        return torch.cat(self.keys, dim=1)


class _PlainCache:
    def __init__(self):
        self.keys = None

    def append(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=1)
        return self.keys


def _restore(cache, keys):
    cache.keys = keys


lowtide.register_state(_PlainCache, take=lambda cache: cache.keys, restore=_restore)


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x, cache=None):
        keys = self.project(x)
        if cache is not None:
            keys = cache.append(keys)
        return x + F.scaled_dot_product_attention(x, keys, keys)


@pytest.mark.parametrize("make", [_Cache, _PlainCache, None])
@pytest.mark.parametrize("keyword", [True, False])
def test_a_cache_that_the_region_appends_to(compare, make, keyword):
    def scenario(region):
        block = _Attention()
        run = region(block)
        seen = []
        for _ in range(3):
            cache = make() if make else None
            x = torch.randn(2, 3, 8, requires_grad=True)
            h = run(x, cache=cache) if keyword else run(x, cache)
            out = run(h, cache=cache) if keyword else run(h, cache)
            out.square().sum().backward()
            seen.append((x.grad, None if cache is None else cache.keys))
        return seen, [p.grad for p in block.parameters()]

    compare(scenario)


def test_a_cache_held_by_the_module(compare):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = _Attention()
            self.cache = _Cache()

        def forward(self, x):
            return torch.sin(self.attention(x, self.cache))

    def scenario(region):
        model = Model()
        run = region(model)
        seen = []
        for _ in range(3):
            model.cache = _Cache()
            x = torch.randn(2, 3, 8, requires_grad=True)
            run(run(x)).sum().backward()
            seen.append((x.grad, model.cache.length))
        return seen

    compare(scenario)


def test_a_transformers_cache_that_the_region_appends_to(compare):
    transformers = pytest.importorskip("transformers")

    def scenario(region):
        torch.manual_seed(0)
        config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=16, attn_pdrop=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.GPT2Model(config)
        argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        for block in model.h:
            block.forward = region(block.forward)
        seen = []
        for _ in range(2):
            cache = transformers.DynamicCache()
            model(torch.arange(4)[None], **{argument: cache}, use_cache=True)
            out = model(torch.arange(3)[None], **{argument: cache}, use_cache=True).last_hidden_state
            out.square().sum().backward()
            seen.append((out, int(cache.get_seq_length())))
        return seen, [p.grad for p in model.parameters()]

    compare(scenario)


def test_an_object_whose_tensor_is_replaced_by_another(compare):
    class Memory:
        def __init__(self):
            self.seen = torch.ones(2, 3)

    class Model(nn.Module):
        def forward(self, x, memory):
            memory.seen = torch.tanh(memory.seen + x.detach())
            return torch.sin(x * memory.seen)

    def scenario(region):
        run, memory, seen = region(Model()), Memory(), []
        for _ in range(3):
            x = torch.randn(2, 3, requires_grad=True)
            run(run(x, memory), memory).sum().backward()
            seen.append((x.grad, memory.seen))
        return seen

    compare(scenario)
