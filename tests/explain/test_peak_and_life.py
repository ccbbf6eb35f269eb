"""The peak and what was alive at it; why a storage lives; and where memory would run out."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.errors import InvalidInputError
from lowtide.explain import out_of_memory, peak, why_alive
from lowtide.plan import simulate
from lowtide.records import Category, Phase

sys.path.insert(0, str(Path(__file__).parent))
from _models import Calls, Mlp


@pytest.fixture
def trace(traced):
    return traced(nn.Sequential(Mlp(16), Mlp(16)), torch.randn(64, 16))


def test_what_is_alive_at_the_peak_adds_up_to_what_is_simulated(trace):
    found, simulation = peak(trace), simulate(trace, None)
    assert found.bytes == simulation.peak_bytes
    assert sum(size for _, size in found.categories) == found.bytes
    assert sum(owner.bytes for owner in found.owners) == found.bytes
    assert sum(storage.bytes for storage in found.storages) == found.bytes
    assert found.of(Category.PARAMETER) == sum(p.numel() for p in nn.Sequential(Mlp(16), Mlp(16)).parameters()) * 4
    assert 0 < found.start_s < found.step_s


def test_what_an_op_needs_inside_is_a_row_at_the_peak(trace):
    ops = [replace(op, workspace_bytes=2**20 if i == len(trace.ops) // 2 else 0) for i, op in enumerate(trace.ops)]
    found = peak(replace(trace, ops=tuple(ops)))
    inside = found.storages[0]
    assert (inside.storage, inside.bytes, inside.because) == (None, 2**20, "workspace of the op")
    assert (inside.made_by, inside.owner) == (found.op_name, found.path)
    assert sum(storage.bytes for storage in found.storages) == sum(owner.bytes for owner in found.owners) == found.bytes


def test_the_peak_says_when_it_is_and_who_has_most(trace):
    found = peak(trace)
    assert found.phase is Phase.BACKWARD
    assert found.op_name.startswith("aten.")
    assert found.source.startswith(__file__.rsplit("/", 1)[0]) or "_models.py" in found.source
    assert found.owners[0].path.split(".")[0] in ("0", "1")
    saved = [storage for storage in found.storages if storage.because == "saved for backward"]
    assert any("TanhBackward0" in storage.nodes for storage in saved)


def test_a_storage_names_what_holds_it_and_who_lets_go_last(trace):
    (life,) = why_alive(trace, "0", most=1)
    assert life.bytes == 64 * 128 * 4
    assert life.path == "0"
    kinds = [(holder.kind, holder.name, holder.path) for holder in life.holders]
    assert ("saved", "AddmmBackward0", "0.down") in kinds
    assert ("saved", "TanhBackward0", "0") in kinds
    assert ("input", "Linear", "0.down") in kinds
    (code,) = (holder for holder in life.holders if holder.kind == "code")
    assert code.until == life.natural_end
    assert "_models.py" in code.source
    assert life.waits_for.name == "TanhBackward0"
    assert life.waits_for.until == life.end > life.natural_end


def test_what_nobody_saves_is_held_by_code_alone(traced):
    found = why_alive(traced(Calls(lambda self, x: self.a(x) + 1.0, a=nn.Linear(16, 16)), torch.randn(4, 16)), "a")
    assert [holder.kind for holder in found[0].holders] == ["code"]
    assert found[0].end == found[0].natural_end


def test_a_storage_is_found_by_its_number(trace):
    (life,) = why_alive(trace, "0", most=1)
    assert why_alive(trace, life.storage) == (life,)


@pytest.mark.parametrize("target", ["nowhere", 10**6, -1])
def test_what_the_trace_does_not_have_is_refused(trace, target):
    with pytest.raises(InvalidInputError, match=str(target)):
        why_alive(trace, target)


def test_a_limit_below_the_peak_runs_out_where_the_step_first_passes_it(trace):
    limit = int(0.8 * peak(trace).bytes)
    found = out_of_memory(trace, limit)
    assert found.alive_bytes <= limit < found.alive_bytes + found.asked_bytes
    assert sum(holding.bytes for holding in found.holdings) == found.alive_bytes
    assert sum(size for _, size in found.categories) == found.alive_bytes
    assert "aten." in found.where
    assert found.summary().startswith("memory ran out at aten.")
    assert found.in_pieces_bytes == 0


def test_a_limit_at_the_peak_is_enough(trace):
    assert out_of_memory(trace, peak(trace).bytes) is None
    assert out_of_memory(trace, peak(trace).bytes - 1) is not None
