"""``substituted()`` reaches whoever holds PyTorch's functions, and puts them back."""

from __future__ import annotations

import functools
import sys
import types

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint as held_here

import lowtide.torch_compat as ours

_THIS = sys.modules[__name__]


@pytest.fixture
def library():
    """A module that imported PyTorch's functions by name, long ago."""
    module = types.ModuleType("a_library")
    module.ckpt, module.sequential = torch_checkpoint.checkpoint, torch_checkpoint.checkpoint_sequential
    sys.modules["a_library"] = module
    yield module
    del sys.modules["a_library"]


def test_every_holder_is_reached_and_restored(library):
    original = torch_checkpoint.checkpoint
    with ours.substituted():
        assert torch_checkpoint.checkpoint is ours.checkpoint
        assert library.ckpt is ours.checkpoint
        assert library.sequential is ours.checkpoint_sequential
        assert _THIS.held_here is ours.checkpoint
    assert torch_checkpoint.checkpoint is original
    assert library.ckpt is original
    assert _THIS.held_here is held_here is original


def test_nested_use_restores_at_the_outermost_end(library):
    original = library.ckpt
    with ours.substituted():
        with ours.substituted():
            assert library.ckpt is ours.checkpoint
        assert library.ckpt is ours.checkpoint
    assert library.ckpt is original


def test_partial_functions_made_before_are_reached_and_those_made_meanwhile_restored():
    original = torch_checkpoint.checkpoint
    before = functools.partial(original, use_reentrant=False)
    with ours.substituted():
        assert (before.func, before.keywords) == (ours.checkpoint, {"use_reentrant": False})
        meanwhile = functools.partial(torch_checkpoint.checkpoint, use_reentrant=True)
    assert (before.func, before.keywords) == (original, {"use_reentrant": False})
    assert (meanwhile.func, meanwhile.keywords) == (original, {"use_reentrant": True})


def test_an_error_restores_too(library):
    original = library.ckpt
    with pytest.raises(KeyError), ours.substituted():
        raise KeyError
    assert library.ckpt is original


def test_a_module_that_is_imported_meanwhile_gets_the_originals_in_the_end():
    original = torch_checkpoint.checkpoint
    late = types.ModuleType("a_late_library")
    with ours.substituted():
        late.ckpt = torch_checkpoint.checkpoint
        sys.modules["a_late_library"] = late
    del sys.modules["a_late_library"]
    assert late.ckpt is original


def test_a_librarys_region_is_right_where_it_was_wrong(library):
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    with ours.substituted():
        out = library.ckpt(block, torch.randn(3, 4, requires_grad=True), use_reentrant=False)
    out.sum().backward()
    assert int(block[1].num_batches_tracked) == 1


def test_regions_of_torch_distributed():
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    composable = pytest.importorskip("torch.distributed._composable")
    with ours.substituted():
        wrapped = wrapper.checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()))
        hooked = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        composable.checkpoint(hooked)
        for model in (wrapped, hooked):
            x = torch.randn(3, 4, requires_grad=True)
            model(x).sum().backward()
            assert x.grad.abs().sum() > 0
            buffers = dict(model.named_buffers())
            assert [int(b) for name, b in buffers.items() if name.endswith("num_batches_tracked")] == [1]


def test_a_module_that_holds_the_functions_of_lowtide_keeps_them():
    holder = types.ModuleType("holder_of_ours")
    holder.checkpoint = ours.checkpoint
    sys.modules["holder_of_ours"] = holder
    try:
        with ours.substituted():
            pass
        assert holder.checkpoint is ours.checkpoint
    finally:
        del sys.modules["holder_of_ours"]
