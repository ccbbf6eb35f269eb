"""Regions under wrappers that watch gradients or take parameters away between forward and backward."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def one_process(tmp_path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs the gloo backend")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Shared(nn.Module):
    def __init__(self, region):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.sometimes = nn.Linear(4, 4)
        object.__setattr__(self, "run", region(self.block))
        object.__setattr__(self, "other", region(self.sometimes))

    def forward(self, x, use_other=False):
        x = self.run(torch.sin(self.run(x)))
        return torch.sin(self.other(x)) if use_other else x


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=["plain", "unused", "static"])
def test_a_shared_block_under_ddp(compare, one_process, options):
    def scenario(region):
        model = DistributedDataParallel(_Shared(region), **options)
        seen = []
        for step in range(4):
            use_other = step % 2 == 0 if "find_unused_parameters" in options else True
            x = torch.randn(2, 4, requires_grad=True)
            model(x, use_other).square().sum().backward()
            seen.append((x.grad, [None if p.grad is None else p.grad.clone() for p in model.parameters()]))
        return seen

    compare(scenario)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_fully_sharded_layers(compare, one_process):
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    def scenario(region):
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        runs = []
        for block in blocks:
            fsdp.fully_shard(block, mesh=mesh)
            runs.append(region(block))
        seen = []
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            h = x
            for run in runs:
                h = run(h)
            h.square().sum().backward()
            seen.append(x.grad)
        return seen, [p.grad.full_tensor() for block in blocks for p in block.parameters()]

    compare(scenario)


class _Emptied(nn.Module):
    """Like ZeRO-3: the weight is there only while the module's forward or backward runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.full = self.linear.weight.detach().clone()
        self.linear.register_forward_pre_hook(lambda *_: self.gather())
        self.linear.register_forward_hook(self.release_until_backward)
        self.release()

    def gather(self):
        self.linear.weight.data = self.full

    def release(self):
        self.linear.weight.data = torch.empty(0)

    def release_until_backward(self, _module, _args, output):
        if output.requires_grad:
            output.register_hook(lambda grad: self.gather())
        self.release()

    def forward(self, x):
        return torch.tanh(self.linear(torch.sin(x)))


def test_parameters_emptied_between_forward_and_backward():
    from lowtide import checkpoint

    plain = nn.Linear(4, 4)
    blocks = [_Emptied(), _Emptied()]
    runs = [checkpoint(block) for block in blocks]
    for _ in range(3):
        x = torch.randn(2, 4, requires_grad=True)
        expected = x.detach().clone().requires_grad_()
        h, e = x, expected
        for run, block in zip(runs, blocks, strict=True):
            h = run(h)
            e = torch.tanh(nn.functional.linear(torch.sin(e), block.full, block.linear.bias.detach()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            h.sum().backward()
        e.sum().backward()
        assert torch.equal(h, e)
        assert torch.equal(x.grad, expected.grad)
    assert plain.weight.numel() == 16


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("inside", [True, False], ids=["region inside", "region around"])
def test_fully_sharded_modules_with_buffers(compare, one_process, inside):
    """The framework moves parameters: what a region saved must still be its to free, and buffers must end as after one forward."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")

    def scenario(region):
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(2)]
        runs = []
        for block in blocks:
            if inside:
                block.forward = region(block.forward)
            fsdp.fully_shard(block, mesh=mesh)
            runs.append(block if inside else region(block))
        seen = []
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            runs[1](runs[0](x)).square().sum().backward()
            seen.append([x.grad, *(buffer.clone() for block in blocks for buffer in block.buffers())])
        return seen, [p.grad.full_tensor() for block in blocks for p in block.parameters()]

    compare(scenario)
