"""The saved-tensor table: bytes by module, node and dtype; storages that are shared; what is kept in two dtypes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.explain import saved_table
from lowtide.explain._step import dtype_of

sys.path.insert(0, str(Path(__file__).parent))
from _models import Calls, Mlp


def without_dtypes(trace):
    blank = {"dtype": ""} if "dtype" in {field.name for field in dataclasses.fields(trace.saved[0])} else {}
    return dataclasses.replace(trace, saved=tuple(dataclasses.replace(tensor, **blank) for tensor in trace.saved))


def test_bytes_are_counted_by_module_and_node_and_a_storage_once(traced):
    table = saved_table(traced(nn.Sequential(Mlp(16), Mlp(16)), torch.randn(64, 16)))
    wide, narrow = 64 * 128 * 4, 64 * 16 * 4
    rows = {(row.path, row.node): row for row in table.rows}
    tanh, down = rows["0", "TanhBackward0"], rows["0.down", "AddmmBackward0"]
    assert (tanh.bytes, tanh.storage_bytes) == (wide, wide)
    assert down.storage_bytes == 0  # its input is what tanh saved already
    assert down.bytes == wide + 16 * 128 * 4  # and its weight is a parameter
    assert rows["1.up", "AddmmBackward0"].storage_bytes == narrow
    assert table.storage_bytes == 2 * wide + narrow + narrow  # and the output, which the loss saves
    assert table.tensors == sum(row.tensors for row in table.rows)


def test_rows_come_in_order_of_bytes(traced):
    rows = saved_table(traced(nn.Sequential(Mlp(16), Mlp(16, 2)), torch.randn(64, 16))).rows
    assert [row.storage_bytes for row in rows] == sorted((row.storage_bytes for row in rows), reverse=True)


def test_storages_with_several_savers_are_listed_with_all_of_them(traced):
    table = saved_table(traced(nn.Sequential(Mlp(16)), torch.randn(64, 16)))
    assert table.shared[0].bytes == 64 * 128 * 4
    assert table.shared[0].savers == (("0", "TanhBackward0"), ("0.down", "AddmmBackward0"))


def test_nothing_is_shared_where_nothing_is(traced):
    assert saved_table(traced(Calls(lambda self, x: self.a(x), a=nn.Linear(16, 16)), torch.randn(4, 16))).shared == ()


def casting(self, x):
    return self.first(x).exp().to(torch.bfloat16).square().float()


@pytest.mark.parametrize("with_dtypes", [True, False])
def test_what_is_kept_in_two_dtypes_is_found(traced, with_dtypes):
    trace = traced(Calls(casting, first=nn.Linear(16, 16)), torch.randn(64, 16))
    table = saved_table(trace if with_dtypes else without_dtypes(trace))
    (pair,) = table.twice  # exp saves its result, and square saves the cast of it
    assert (pair.original_bytes, pair.copy_bytes, pair.of_parameter) == (64 * 16 * 4, 64 * 16 * 2, False)
    assert "test_saved_table.py" in pair.source
    if with_dtypes and dtype_of(trace.saved[0]):
        assert pair.dtypes == ("float32", "bfloat16")


def test_a_parameter_that_autocast_keeps_in_half_is_found(traced):
    def half(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(torch.tanh(x * self.linear(x)))

    found = saved_table(
        traced(Calls(half, linear=nn.Linear(16, 16)), torch.randn(64, 16), loss=lambda out: out.float().square().mean())
    ).twice
    assert any(pair.of_parameter for pair in found)


def test_one_dtype_is_not_two(traced):
    assert saved_table(traced(nn.Sequential(Mlp(16)), torch.randn(64, 16))).twice == ()
