"""The report of a failed CUDA allocation, from a snapshot such as the allocator gives; no GPU is needed for that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide import memory_watch
from lowtide.measure import _out_of_memory as module
from lowtide.records import Category

MIB = 2**20


@pytest.fixture
def allocator(monkeypatch):
    """An allocator that is told what it has; calling the result is what the real one does when it fails."""
    observers, segments, recording = [], [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(private, "attach_out_of_memory_observer", observers.append)
    monkeypatch.setattr(private, "record_allocations", recording.append)
    monkeypatch.setattr(private, "allocator_snapshot", lambda: segments)
    module._observe_once.cache_clear()

    def fail(asked, blocks, free=MIB):
        size = sum(block["size"] for block in blocks)
        segments[:] = [{"device": 0, "address": blocks[0].get("address", 0), "total_size": size, "blocks": blocks}]
        for observer in observers:
            observer(0, asked, size, free)

    fail.observers, fail.recording = observers, recording
    yield fail
    module._observe_once.cache_clear()


def block(size, address=None, state="active_allocated", line=None):
    torch_frame = {"filename": "/x/site-packages/torch/nn/functional.py", "line": 7, "name": "linear"}
    frames = [torch_frame, {"filename": "/home/me/train.py", "line": line, "name": "step"}] if line else []
    return {"size": size, "state": state, "frames": frames} | ({"address": address} if address else {})


def test_blocks_are_named_by_what_they_are(allocator):
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    weight = model[0].weight
    state = optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight)  # a step would ask the GPU that is only pretended
    with memory_watch(model) as watch:
        allocator(
            5 * MIB,
            [
                block(1 * MIB, weight.data_ptr()),
                block(2 * MIB, weight.grad.data_ptr()),
                block(3 * MIB, state.data_ptr()),
                block(4 * MIB, 1, line=12),
                block(5 * MIB, 2, line=12),
                block(6 * MIB, 3, state="inactive"),
            ],
        )
    report = watch.report
    assert (report.asked_bytes, report.alive_bytes, report.reserved_bytes, report.limit_bytes) == (5 * MIB, 15 * MIB, 21 * MIB, 22 * MIB)
    assert report.in_pieces_bytes == 6 * MIB
    assert [(h.owner, h.category, h.bytes // MIB, h.blocks) for h in report.holdings] == [
        ("/home/me/train.py:12", Category.ACTIVATION, 9, 2),
        ("AdamW", Category.OPTIMIZER, 3, 1),
        ("0", Category.GRADIENT, 2, 1),
        ("0", Category.PARAMETER, 1, 1),
    ]
    assert "5.00 MiB were asked for with 15.00 MiB of 22.00 MiB in use" in report.summary()
    assert "6.00 MiB more are reserved in pieces" in report.summary()


def test_it_says_whether_it_was_in_backward(allocator):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            allocator(MIB, [block(MIB, 1, line=3)])
            return grad

    with memory_watch(nn.Linear(2, 2)) as watch:
        Fails.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert watch.report.phase == "backward"
    assert "FailsBackward" in watch.report.where
    with memory_watch(nn.Linear(2, 2)) as watch:
        allocator(MIB, [block(MIB, 1, line=3)])
    assert watch.report.phase == "forward"
    assert "test_out_of_memory.py" in watch.report.where


def test_one_observer_serves_every_watch_and_lines_are_noted_only_meanwhile(allocator):
    for _ in range(3):
        with memory_watch(nn.Linear(2, 2)):
            pass
    assert len(allocator.observers) == 1
    assert allocator.recording == [True, False] * 3
    with memory_watch(nn.Linear(2, 2)) as first:
        pass
    allocator(MIB, [block(MIB, 1)])
    assert first.report is None


def test_blocks_without_addresses_are_placed_one_after_the_other(allocator):
    model = nn.Linear(4, 4)
    start = model.weight.data_ptr() - MIB
    with memory_watch(model) as watch:
        allocator(MIB, [block(MIB, start), block(MIB, start + MIB)])
    assert Category.PARAMETER in [h.category for h in watch.report.holdings]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_nothing_is_watched():
    with memory_watch(nn.Linear(2, 2)) as watch:
        pass
    assert watch.report is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_real_failure_is_reported():
    model = nn.Linear(1024, 1024, device="cuda")
    with memory_watch(model) as watch, pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    assert watch.report.asked_bytes >= 2**50
    assert any(h.category is Category.PARAMETER for h in watch.report.holdings)
