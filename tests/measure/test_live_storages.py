"""What is alive on a device, as far as Python can tell."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lowtide.measure._phase_peaks import live_storages


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_tensor_spread_over_processes_counts_with_what_is_here(tmp_path):
    tensor = pytest.importorskip("torch.distributed.tensor")
    cpu = torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        before = live_storages(nn.Module(), cpu)
        spread = tensor.DTensor.from_local(torch.ones(1000), mesh, [tensor.Shard(0)])
        after = live_storages(nn.Module(), cpu)
        assert sum(size for key, size in after.items() if key not in before) == 4000
        del spread
    finally:
        dist.destroy_process_group()


def test_what_was_frozen_counts():
    tensor = torch.ones(1000)
    gc.freeze()
    try:
        assert live_storages(None, torch.device("cpu"))[tensor.untyped_storage()._cdata] == 4000
    finally:
        gc.unfreeze()


def test_what_is_frozen_later_counts_whatever_was_frozen_before():
    for _ in range(2):
        tensor = torch.ones(1000)
        live_storages(None, torch.device("cpu"))
        gc.freeze()
        try:
            found = live_storages(None, torch.device("cpu"))
        finally:
            gc.unfreeze()
        assert found[tensor.untyped_storage()._cdata] == 4000


def test_looks_freeze_nothing_that_nobody_froze():
    gc.freeze()
    try:
        live_storages(None, torch.device("cpu"))
        cycle = [torch.ones(1000)]
        cycle.append(cycle)
        alive = weakref.ref(cycle[0])
        for _ in range(3):
            live_storages(None, torch.device("cpu"))
            gc.collect()
        del cycle
        gc.collect()
        assert alive() is None
    finally:
        gc.unfreeze()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_sparse_tensor_counts_with_its_indices_and_values():
    before = live_storages(None, torch.device("cpu"))
    coo, csr = torch.eye(100).to_sparse(), torch.eye(50).to_sparse_csr()
    parts = [coo._indices(), coo._values(), csr.crow_indices(), csr.col_indices(), csr.values()]
    expected = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    del parts
    after = live_storages(None, torch.device("cpu"))
    assert {key: size for key, size in after.items() if key not in before} == expected
