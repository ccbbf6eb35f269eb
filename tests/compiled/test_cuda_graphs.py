"""CUDA graphs: the compiler captures steps with regions in them; of those that Python runs that is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine._guards import _random
from lowtide.errors import ReplayError

from ._models import WIDTH, Block, Dropout, stack, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@cuda
def test_a_capture_of_a_step_whose_regions_run_in_python_is_refused():
    model, given = stack(Dropout).cuda(), torch.randn(8, WIDTH, device="cuda")
    lowtide.apply(model, "full")
    model(given).sum().backward()
    with pytest.raises(ReplayError, match="captured in a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(given).sum().backward()


def test_what_is_said_of_it(monkeypatch):
    region = lowtide.checkpoint(Block())
    steps(region, nn.Module(), (8, 8))
    known = [*_random.ONLY_CPU]
    _random.ONLY_CPU.clear()
    monkeypatch.setattr(_random, "_has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    try:
        with pytest.raises(ReplayError, match=r"captured in a CUDA graph.*reduce-overhead"):
            steps(region, nn.Module(), (8,))
    finally:
        _random.ONLY_CPU[:] = known


@cuda
def test_a_compiled_model_whose_graphs_are_captured():
    plain, model = stack(Dropout).cuda(), stack(Dropout).cuda()
    lowtide.apply(model, "full")
    runs = [torch.compile(each, mode="reduce-overhead") for each in (model, plain)]
    given = torch.randn(8, WIDTH, device="cuda")
    for _ in range(4):
        found = []
        for run, each in zip(runs, (model, plain), strict=True):
            torch.cuda.manual_seed(3)
            each.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            run(given).square().sum().backward()
            found.append([parameter.grad.clone() for parameter in each.parameters()])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
