"""What would help: each remedy on a model that needs it, against a model that has it; and the honest no."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowtide.explain import Remedy, advice, explain, frontier, peak
from lowtide.explain._advice import attention_weights
from lowtide.explain._step import StepView
from lowtide.plan import simulate

sys.path.insert(0, str(Path(__file__).parent))
from _models import Calls, Mlp


def remedies(trace):
    return {advised.remedy: advised for advised in advice(trace, time_limit_s=2).remedies}


def blocks(traced):
    return traced(nn.Sequential(*(Mlp(16) for _ in range(4))), torch.randn(256, 16))


def test_replay_is_advised_with_what_simulation_says_of_it(traced):
    trace = blocks(traced)
    found = advice(trace, time_limit_s=2)
    assert found.checkpointing_helps
    assert "helps" in found.verdict
    replays = [advised for advised in found.remedies if advised.remedy is Remedy.REPLAY]
    for advised in replays:
        after = simulate(trace, advised.regions)
        assert (after.peak_bytes, after.added_s) == (advised.peak_bytes, advised.adds_s)
        assert advised.saves_bytes == found.peak_bytes - after.peak_bytes > 0


def test_remedies_are_ranked_by_what_they_save(traced):
    saves = [advised.saves_bytes for advised in advice(blocks(traced), time_limit_s=2).remedies]
    assert saves == sorted(saves, reverse=True)


def language_model(traced, vocabulary):
    targets = torch.randint(vocabulary, (256,))
    model = nn.Sequential(Mlp(16, 2), nn.Linear(16, vocabulary, bias=False))
    return traced(model, torch.randn(256, 16), loss=lambda out: F.cross_entropy(out, targets))


def test_a_large_vocabulary_is_told_to_take_its_loss_in_chunks_and_that_replay_will_not_help(traced):
    trace = language_model(traced, 3000)
    found = advice(trace, time_limit_s=2)
    assert not found.checkpointing_helps
    assert "activation checkpointing will not help here" in found.verdict
    assert "logits" in found.verdict
    assert found.remedies[0].remedy is Remedy.CHUNKED_LOSS
    logits = 256 * 3000 * 4
    assert found.remedies[0].saves_bytes >= logits  # of the logits, log-probabilities and gradient, at least one is left out of the peak
    assert found.remedies[0].adds_s > 0


def test_the_chunked_loss_saves_what_it_is_said_to(traced):
    """Against the step with the remedy carried out: chunks of the loss, each replayed."""
    from lowtide import checkpoint

    predicted = remedies(language_model(traced, 3000))[Remedy.CHUNKED_LOSS].peak_bytes
    targets = torch.randint(3000, (256,))
    body, head = Mlp(16, 2), nn.Linear(16, 3000, bias=False)

    def forward(self, x):
        def part(h, wanted):
            return F.cross_entropy(self.head(h), wanted, reduction="sum")

        hidden = self.body(x)
        return sum(checkpoint(part)(h, wanted) for h, wanted in zip(hidden.chunk(8), targets.chunk(8), strict=True)) / 256

    done = peak(traced(Calls(forward, body=body, head=head), torch.randn(256, 16), loss=lambda out: out)).bytes
    assert abs(done - predicted) < 0.3 * done


def test_a_small_vocabulary_is_not(traced):
    assert Remedy.CHUNKED_LOSS not in remedies(language_model(traced, 4))


def attention(traced, attend):
    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).view(2, 64, 3, 4, 4).unbind(2))
        return attend(q, k, v).transpose(1, 2).reshape(2, 64, 16)

    return traced(nn.Sequential(Calls(forward, qkv=nn.Linear(16, 48)), nn.Linear(16, 16)), torch.randn(2, 64, 16))


def test_attention_written_out_is_told_of_fused_kernels(traced):
    trace = attention(traced, lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
    found = remedies(trace)[Remedy.ATTENTION]
    assert found.saves_bytes >= 2 * 4 * 64 * 64 * 4  # of the weights, more than one matrix is alive at the peak
    fused = peak(attention(traced, F.scaled_dot_product_attention)).bytes
    assert found.peak_bytes == pytest.approx(fused, rel=0.15)  # but for the buffers of the fused kernel, which no trace of this step has


def test_fused_attention_is_not(traced):
    trace = attention(traced, F.scaled_dot_product_attention)
    assert attention_weights(StepView(trace)) == []
    assert Remedy.ATTENTION not in remedies(trace)


def test_an_optimizer_that_holds_the_peak_is_told_to_go_one_by_one(traced):
    make = lambda foreach: lambda p: torch.optim.AdamW(p, foreach=foreach)  # noqa: E731
    models = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for _ in range(2)]
    together, alone = (traced(model, torch.randn(2, 64), optimizer=make(f)) for model, f in zip(models, (True, False), strict=True))
    found = remedies(together)[Remedy.OPTIMIZER]
    assert abs(found.peak_bytes - peak(alone).bytes) < 0.1 * peak(alone).bytes
    assert "optimizer" in advice(together, time_limit_s=2).verdict
    assert Remedy.OPTIMIZER not in remedies(alone)


def test_micro_batches_are_predicted_as_they_are(traced):
    model = nn.Sequential(*(Mlp(16) for _ in range(4)))
    found = remedies(traced(model, torch.randn(256, 16)))[Remedy.MICRO_BATCHES]

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(*(Mlp(16) for _ in range(4)))

        def forward(self, x):
            self.model(x).square().mean().backward()
            return self.model(x).square().mean()

    halves = peak(traced(Halves(), torch.randn(128, 16), loss=lambda out: out)).bytes
    assert abs(found.peak_bytes - halves) < 0.05 * halves


def test_offloading_is_advised_on_a_device_and_not_on_the_host(traced):
    trace = traced(nn.Sequential(*(Mlp(64, 32) for _ in range(3))), torch.randn(256, 64))
    assert Remedy.OFFLOAD not in remedies(trace)
    found = remedies(dataclasses.replace(trace, device="cuda:0"))[Remedy.OFFLOAD]
    assert found.saves_bytes >= 256 * 64 * 32 * 4  # one at least of the wide results is away at the peak


def test_the_frontier_falls_from_small_and_slow_to_the_step_as_it_is(traced):
    trace = blocks(traced)
    points = frontier(trace, time_limit_s=2)
    assert len(points) >= 3
    assert [p.peak_bytes for p in points] == sorted(p.peak_bytes for p in points)
    assert [p.replay_s for p in points] == sorted((p.replay_s for p in points), reverse=True)
    assert (points[-1].regions, points[-1].replay_s) == ((), 0.0)
    for point in points:
        after = simulate(trace, point.regions)
        assert (after.peak_bytes, after.planned_s) == (point.peak_bytes, point.step_s)
        assert point.peak_bytes <= point.budget_bytes


def test_a_very_long_step_is_not_searched_but_has_a_frontier(traced, monkeypatch):
    trace = traced(nn.Sequential(*(Mlp(16) for _ in range(9))), torch.randn(256, 16))
    searched = frontier(trace, time_limit_s=2)
    monkeypatch.setattr("lowtide.explain._frontier._MOST_CALLS", 5)
    points = frontier(trace)
    assert {point.status for point in points[:-1]} == {"rule"}
    assert points[-1] == searched[-1]
    assert points[0].peak_bytes < 0.6 * points[-1].peak_bytes
    for point in points:
        after = simulate(trace, point.regions)
        assert (after.peak_bytes, after.added_s) == (point.peak_bytes, point.replay_s)


def test_a_step_with_nothing_to_replay_has_one_point(traced):
    trace = traced(Calls(lambda self, x: x * self.a.weight, a=nn.Linear(16, 16)), torch.randn(16, 16))
    (point,) = frontier(trace, time_limit_s=1)
    assert point.peak_bytes == peak(trace).bytes


def test_all_explanations_come_together(traced):
    found = explain(blocks(traced), time_limit_s=1)
    assert found.peak.bytes == found.advice.peak_bytes == found.frontier[-1].peak_bytes
    assert found.saved.rows
    assert found.regions
