"""Closed forms against the formulas of the papers, published sizes, and traces of the same models."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli import app
from lowtide.distributed import (
    POLICIES,
    Architecture,
    Mesh,
    Setup,
    agreement,
    architecture,
    bundled,
    estimate,
    layer_terms,
    parse_mesh,
    plan_stages,
    trace_architecture,
)
from lowtide.errors import InfeasibleBudgetError, InvalidInputError
from lowtide.records import StepTrace

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "gpt3-175b": 174_604_259_328,
}


@pytest.mark.parametrize("name", bundled())
def test_bundled_configs_have_the_published_number_of_parameters(name: str) -> None:
    assert architecture(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize("sequence", [512, 2048])
def test_a_classic_block_keeps_what_korthikanti_et_al_say(tp: int, sequence_parallel: bool, sequence: int) -> None:
    model = architecture("gpt3-175b")
    h, a, s, b, t = model.width, model.heads, sequence, 2, tp
    setup = Setup(s, b, mesh=Mesh(tp=tp), sequence_parallel=sequence_parallel, attention="math")
    terms = layer_terms(model, setup)
    scores = 5 * a * s / h
    expected = s * b * h * ((34 + scores) / t if sequence_parallel else 10 + 24 / t + scores / t)
    assert sum(term.bytes for term in terms) == pytest.approx(expected, rel=1e-12)
    if sequence_parallel:
        assert sum(term.bytes for term in terms if not term.core) == pytest.approx(34 * s * b * h / t, rel=1e-12)


@pytest.mark.parametrize(("zero", "bytes_a_parameter"), [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_zero_splits_what_rajbhandari_et_al_say(zero: int, bytes_a_parameter: float) -> None:
    model = architecture("llama-2-7b")
    rank = estimate(model, Setup(2048, mesh=Mesh(dp=64), zero=zero)).ranks[0]
    assert rank.state_bytes == pytest.approx(model.parameters * bytes_a_parameter)


@pytest.mark.parametrize(
    ("schedule", "chunks", "in_flight"),
    [("gpipe", 1, [8, 8, 8, 8]), ("1f1b", 1, [4, 3, 2, 1]), ("zero-bubble", 1, [4, 4, 4, 4]), ("interleaved", 2, [5.5, 4.5, 3.5, 2.5])],
)
def test_micro_batches_in_flight(schedule: str, chunks: int, in_flight: list[float]) -> None:
    model, setup = architecture("llama-2-7b"), Setup(128, micro_batches=8, mesh=Mesh(pp=4), schedule=schedule, chunks=chunks)
    one = estimate(model, replace(setup, micro_batches=1, schedule="1f1b", chunks=1)).ranks
    head = [0, 0, 0, 2 * 128 * model.width * 2]
    many = estimate(model, setup).ranks
    found = [(m.activation_bytes - h) / (o.activation_bytes - h) for m, o, h in zip(many, one, head, strict=True)]
    assert found == pytest.approx(in_flight)


@functools.cache
def small(name: str, attention: str, value_bytes: int, width: int) -> tuple[Architecture, Setup, StepTrace]:
    full = architecture(name)
    model = replace(full, layers=4, width=width, heads=8, kv_heads=8 * full.kv_heads // full.heads, head_size=width // 8, hidden=3 * width)
    setup = Setup(512, 2, attention=attention, value_bytes=value_bytes, gradient_bytes=value_bytes)
    return model, setup, trace_architecture(model, setup)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("name", "attention", "value_bytes", "width"),
    [("llama-3-8b", "fused", 2, 512), ("llama-2-7b", "math", 2, 512), ("llama-2-7b", "fused", 4, 256), ("mixtral-8x7b", "fused", 2, 256)],
)
def test_closed_forms_agree_with_a_trace(name: str, attention: str, value_bytes: int, width: int, policy: str) -> None:
    model, setup, traced = small(name, attention, value_bytes, width)
    found = agreement(traced, model, setup, policy)
    assert found.agrees, (found.ratio, found.at)


def test_replays_trade_bytes_for_arithmetic() -> None:
    by_policy = {p: estimate(architecture("gpt3-175b"), Setup(2048, attention="math"), p) for p in POLICIES}
    activations = [by_policy[p].ranks[0].activation_bytes for p in ("none", "selective", "full", "sqrt")]
    assert activations == sorted(activations, reverse=True)
    assert by_policy["none"].slowdown == 1
    assert 1 < by_policy["selective"].slowdown < 1.05
    assert 1.3 < by_policy["full"].slowdown < 1.34


def test_early_stages_replay_more_and_the_slowest_does_less_than_with_one_choice() -> None:
    plan = plan_stages(architecture("llama-3-70b"), Setup(8192, micro_batches=16, mesh=Mesh(8, 4, 2), zero=3), 75e9)
    whole = [rank.replays.full for rank in plan.estimate.ranks]
    assert whole == sorted(whole, reverse=True)
    assert whole[0] > whole[-1]
    assert plan.estimate.peak_bytes <= 75e9
    assert plan.uniform is not None
    assert plan.estimate.slowdown < plan.uniform.slowdown


def test_no_choice_of_a_stage_is_faster_and_fits() -> None:
    """Every way to divide each stage is tried again, by the estimate alone."""
    from lowtide.distributed._estimate import Counts
    from lowtide.distributed._replay import Replays
    from lowtide.distributed._stages import stages

    model = replace(architecture("gpt3-175b"), layers=6)
    setup = Setup(2048, micro_batches=4, mesh=Mesh(dp=2, pp=2, tp=2), attention="math")
    budget = (estimate(model, setup).peak_bytes + estimate(model, setup, "full").peak_bytes) / 2
    plan, counts = plan_stages(model, setup, budget), Counts(model, setup)
    for stage, chosen in zip(stages(model, setup), plan.estimate.ranks, strict=True):
        ways = [Replays(k, s, stage.layers - k - s) for k in range(stage.layers + 1) for s in range(stage.layers + 1 - k)]
        fitting = [rank for rank in (counts.rank(stage, way) for way in ways) if rank.peak_bytes <= budget]
        assert chosen.flops == min(rank.flops for rank in fitting)


def test_a_budget_that_nothing_fits_names_the_stage_and_what_holds_the_memory() -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"stage 0 needs .* optimizer") as caught:
        plan_stages(architecture("llama-3-70b"), Setup(8192), 80e9)
    least = caught.value.smallest_bytes
    assert plan_stages(architecture("llama-3-70b"), Setup(8192), least).estimate.peak_bytes <= least


@pytest.mark.parametrize("text", ["dp", "dp=0", "xp=2", "dp=2,dp=2", "dp=-1"])
def test_a_mesh_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot read"):
        parse_mesh(text)


@pytest.mark.parametrize(
    "wrong",
    [{"zero": 4}, {"sequence": 0}, {"schedule": "2f2b"}, {"attention": "flash"}, {"chunks": 2}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_setup_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError):
        Setup(**{"sequence": 128, **wrong})  # type: ignore[arg-type]


def test_configs_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="holds list"):
        architecture(tmp_path)
    with pytest.raises(InvalidInputError, match="llama-2-7b"):
        architecture("llama-9")
    with pytest.raises(InvalidInputError, match="num_hidden_layers or n_layer"):
        architecture({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 10})
    with pytest.raises(InvalidInputError, match="decoder-only"):
        architecture({"is_encoder_decoder": True})
    with pytest.raises(InvalidInputError, match="too few"):
        estimate(architecture("llama-2-7b"), Setup(128, mesh=Mesh(pp=64)))


def test_a_config_file_of_its_own(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert architecture(tmp_path).parameters == 124_439_808  # GPT-2 small, as published


@pytest.mark.parametrize(
    ("kind", "sizes", "published"),
    [
        ("gpt_neox", (2048, 8, 8, 16, 8192, 50304, False), 1_011_781_632),  # Pythia 1B
        ("starcoder2", (3072, 24, 2, 30, 12288, 49152, True), 3_030_371_328),
    ],
)
def test_families_whose_mlp_has_no_gate(kind: str, sizes: tuple[int, ...], published: int) -> None:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "intermediate_size", "vocab_size")
    config = {"model_type": kind, **dict(zip((*names, "tie_word_embeddings"), sizes, strict=True))}
    assert architecture(config).parameters == published


def test_families_that_the_closed_forms_are_not_of_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"family 'falcon'.*lowtide\.trace"):
        architecture({"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128})


def test_no_torch_is_needed() -> None:
    code = "import sys; sys.modules['torch'] = None; from lowtide.distributed import *; estimate(architecture('llama-2-7b'), Setup(128))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_commands() -> None:
    run = CliRunner().invoke
    found = json.loads(run(app, ["estimate", "llama-2-7b", "--micro-batch", "4", "--zero", "3", "--policy", "full", "--json"]).stdout)
    expected = estimate(architecture("llama-2-7b"), Setup(2048, 4, mesh=Mesh(dp=8), zero=3), "full")
    assert [each["peak_bytes"] for each in found["estimates"]] == [expected.peak_bytes]
    shown = run(app, ["plan", "--config", "llama-3-70b", "--gpu", "h100-80gb", "--mesh", "dp=8,pp=4,tp=2", "--zero", "3", "--seq", "8192"])
    assert shown.exit_code == 0
    assert "The slowest stage does" in shown.stdout
    assert run(app, ["plan", "--config", "llama-3-70b"]).exit_code == 2
