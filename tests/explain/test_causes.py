"""Each reason why a replay frees nothing, on a model built to show it; and silence where the replay does free something."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide.errors import InvalidInputError
from lowtide.explain import Cause, PeakIn, region_replays

sys.path.insert(0, str(Path(__file__).parent))
from _models import Calls, Mlp


def only(trace, path):
    (found,) = region_replays(trace, (path,))
    return found


def causes(trace, path):
    return [reason.cause for reason in only(trace, path).reasons]


def test_a_block_whose_inside_is_wide_frees_it_and_nothing_is_to_be_explained(traced):
    found = only(traced(nn.Sequential(Mlp(16), Mlp(16), Mlp(16)), torch.randn(64, 16)), "1")
    assert found.reasons == ()
    assert found.helps
    assert found.freed_bytes == 64 * 8 * 16 * 4  # the result of tanh, which tanh and the second linear save
    assert found.peak_fall_bytes > 0
    assert found.replay_s > 0


def test_a_module_that_saves_nothing(traced):
    model = nn.Sequential(Mlp(16), Calls(lambda self, x: x + 1.0), Mlp(16))
    assert causes(traced(model, torch.randn(64, 16)), "1") == [Cause.NOTHING_SAVED]


def test_what_a_linear_saves_is_its_input(traced):
    trace = traced(nn.Sequential(Mlp(16), nn.Linear(16, 16), Mlp(16)), torch.randn(64, 16))
    (reason,) = only(trace, "1").reasons
    assert (reason.cause, reason.bytes) == (Cause.REGION_INPUT, 64 * 16 * 4)


def test_a_view_that_another_module_keeps_holds_the_whole_storage(traced):
    grow = Calls(lambda self, x: torch.tanh(self.up(x)), up=nn.Linear(16, 64))
    half = Calls(lambda self, x: self.out(x[:, :32]), out=nn.Linear(32, 16))
    found = only(traced(nn.Sequential(Mlp(16), grow, half), torch.randn(64, 16)), "1")
    assert found.reasons[0].cause is Cause.VIEW_OF_KEPT
    assert found.reasons[0].bytes == 64 * 64 * 4
    assert "AddmmBackward0 of 2.out" in found.reasons[0].text


def test_a_result_that_the_next_module_saves_as_well(traced):
    found = only(traced(nn.Sequential(Mlp(16), nn.Tanh(), nn.Linear(16, 16), Mlp(16)), torch.randn(64, 16)), "1")
    assert found.reasons[0].cause is Cause.KEPT_BY_NEIGHBOUR
    assert "AddmmBackward0 of 2" in found.reasons[0].text


def test_a_result_that_the_loss_saves(traced):
    trace = traced(nn.Sequential(Mlp(16), nn.Tanh()), torch.randn(64, 16))
    found = only(trace, "1")
    assert found.reasons[0].cause is Cause.KEPT_BY_LOSS
    assert "PowBackward0" in found.reasons[0].text


def test_a_result_that_the_user_keeps_in_a_variable(traced):
    last = []

    def forward(self, x):
        last[:] = [torch.exp(self.up(x))]  # for a plot, say: it lives until the next step
        return last[0]

    model = nn.Sequential(Mlp(16), Calls(forward, up=nn.Linear(16, 16)), Calls(lambda self, x: self.down(x * 2.0), down=Mlp(16)))
    found = only(traced(model, torch.randn(64, 16)), "1")
    (reason,) = (reason for reason in found.reasons if reason.cause is Cause.KEPT_BY_USER)
    assert reason.bytes == 64 * 16 * 4
    assert "test_causes.py" in reason.text


def test_an_input_that_would_be_gone_without_the_replay(traced):
    model = nn.Sequential(Mlp(16), nn.Dropout(0.5), Mlp(16))
    found = only(traced(model, torch.randn(64, 16)), "1")
    assert next(reason.cause for reason in found.reasons) is Cause.INPUT_HELD


def attention(call):
    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).view(2, 32, 3, 4, 4).unbind(2))
        return self.attend(q, k, v).transpose(1, 2).reshape(2, 32, 16)

    return Calls(forward, qkv=nn.Linear(16, 48), attend=Calls(call))


def test_fused_attention_never_had_the_big_matrix(traced):
    fused = attention(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v))
    model = nn.Sequential(fused, nn.Linear(16, 16))
    found = only(traced(model, torch.randn(2, 32, 16)), "0.attend")
    assert Cause.FUSED_ATTENTION in [reason.cause for reason in found.reasons]
    assert Cause.REGION_INPUT in [reason.cause for reason in found.reasons]


def test_attention_written_out_has_the_matrix_and_frees_it(traced):
    plain = attention(lambda self, q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
    found = only(traced(nn.Sequential(plain, nn.Linear(16, 16)), torch.randn(2, 32, 16)), "0.attend")
    assert Cause.FUSED_ATTENTION not in [reason.cause for reason in found.reasons]
    assert found.freed_bytes >= 2 * 4 * 32 * 32 * 4


def elsewhere(trace, path):
    found = only(trace, path)
    assert found.freed_bytes > 0
    assert [reason.cause for reason in found.reasons] == [Cause.PEAK_ELSEWHERE]
    return found.reasons[0].peak_in


def test_the_peak_is_in_the_logits(traced):
    targets = torch.randint(4000, (64,))
    model = nn.Sequential(Mlp(8, times=2), nn.Linear(8, 4000, bias=False))
    assert elsewhere(traced(model, torch.randn(64, 8), loss=lambda out: F.cross_entropy(out, targets)), "0") is PeakIn.LOGITS


def test_the_peak_is_in_the_optimizer(traced):
    trace = traced(nn.Sequential(Mlp(64), Mlp(64)), torch.randn(2, 64), optimizer=lambda p: torch.optim.AdamW(p, foreach=True))
    assert elsewhere(trace, "0") is PeakIn.OPTIMIZER


def test_the_peak_is_in_temporaries(traced):
    def wide_for_a_moment(self, x):
        with torch.no_grad():
            scale = (x.unsqueeze(0).expand(400, *x.shape) * 1.5).sum(0)
        return self.out(x * scale.clamp(max=1.0))

    model = nn.Sequential(Mlp(16, times=2), Calls(wide_for_a_moment, out=nn.Linear(16, 16)))
    assert elsewhere(traced(model, torch.randn(64, 16)), "0") is PeakIn.TEMPORARIES


def test_parameters_fill_the_peak(traced):
    model = nn.Sequential(Mlp(16, times=2), nn.Linear(16, 4000), Calls(lambda self, x: x.sum(1, keepdim=True)))
    assert elsewhere(traced(model, torch.randn(2, 16)), "0") is PeakIn.STATE


def test_all_is_back_at_the_peak_when_the_whole_model_is_one_region(traced):
    model = nn.Sequential(Mlp(16), Mlp(16))
    assert causes(traced(Calls(lambda self, x: self.all(x), all=model), torch.randn(256, 16)), "all") == [Cause.REPLAYED_AT_PEAK]


def test_without_paths_alike_modules_share_a_row(traced):
    rows = region_replays(traced(nn.Sequential(Mlp(16), Mlp(16), Mlp(16)), torch.randn(64, 16)))
    (blocks,) = (row for row in rows if row.type == "Mlp")
    assert blocks.paths == ("0", "1", "2")
    assert blocks.name == "0 … 2 (3)"
    assert [row.saved_bytes for row in rows] == sorted((row.saved_bytes for row in rows), reverse=True)


def test_a_module_that_runs_inside_a_sibling_is_no_region_beside_it(traced):
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Mlp(16) for _ in range(3))
            self.layers[0].forward = lambda x: self.layers[1](torch.tanh(self.layers[0].down(self.layers[0].up(x))))

        def forward(self, x):
            return self.layers[2](self.layers[0](x))

    (mlps,) = (row for row in region_replays(traced(Chain(), torch.randn(64, 16))) if row.type == "Mlp")
    assert mlps.paths == ("layers.0", "layers.2")


def test_a_module_that_the_step_never_calls_is_refused(traced):
    with pytest.raises(InvalidInputError, match="'nowhere'"):
        region_replays(traced(Mlp(16), torch.randn(4, 16)), ("nowhere",))
