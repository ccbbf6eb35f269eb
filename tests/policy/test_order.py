"""Policies and plans beside what shards a model, in either order; and beside other checkpointing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.errors import PolicyError
from lowtide.policy import apply, blocks, by_layer_type, fingerprint, full

from ._models import Block, llama


@pytest.mark.slow
def test_either_order_with_fully_shard_on_two_processes(tmp_path):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs the gloo backend")
    script, store = Path(__file__).with_name("_sharded.py"), tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-W", "ignore", str(script), str(rank), "2", str(store)] for rank in range(2)]
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=900)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


class FSDPModule:
    """Stands for torch's, which needs a process group."""


def _sharded(module: nn.Module) -> None:
    """What ``fully_shard`` does to the class of a module."""
    kind = type(module)
    module.__class__ = type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


def test_a_sharded_model_has_the_structure_that_it_had():
    model = llama(3)
    before = fingerprint(model), blocks(model)
    _sharded(model.blocks[1])
    _sharded(model)
    assert (fingerprint(model), blocks(model)) == before
    assert len(by_layer_type({"Block": full()}).regions(model)) == len(by_layer_type({Block: full()}).regions(model)) == 3


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module


def test_a_model_in_a_sharding_wrapper_is_refused():
    model = llama(2)
    model.blocks[1] = Wrapper(model.blocks[1])
    with pytest.raises(PolicyError, match=r"'blocks\.1' is wrapped by FullyShardedDataParallel already.*apply first"):
        apply(model, "full")
    assert all("forward" not in vars(part) for part in model.modules())


def test_a_module_that_checkpoints_itself_is_told_of():
    model = llama(2)
    model.blocks[1].attention.gradient_checkpointing = True
    with pytest.warns(UserWarning, match=r"'blocks\.1\.attention' checkpoints itself already"):
        lowtide.apply(model, "full")
