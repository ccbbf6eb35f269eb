"""Settings of DeepSpeed and Megatron-LM, read as policies."""

from __future__ import annotations

import json

import pytest

from lowtide.errors import InvalidInputError
from lowtide.policy import apply, deepspeed, full, megatron, megatron_full, megatron_selective, parse_policy, policy_from_json

from ._models import llama


def _regions(policy, layers=5):
    handle = apply(llama(layers), policy)
    names = list(handle.regions)
    handle.remove()
    return names


def _block(**settings):
    return {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "activation_checkpointing": settings}


def test_deepspeed_replays_every_block_or_so_many_segments():
    plain = {"contiguous_memory_optimization": True, "profile": False, "cpu_checkpointing": False, "number_checkpoints": None}
    assert deepspeed(_block(**plain)) == full()
    assert _regions(deepspeed(_block(number_checkpoints=2))) == ["blocks.0 … blocks.2", "blocks.3 … blocks.4"]
    assert _regions(deepspeed(_block(number_checkpoints=9))) == [f"blocks.{layer}" for layer in range(5)]
    policy = deepspeed(_block(number_checkpoints=2))
    assert policy_from_json(policy.to_json()) == policy


def test_deepspeed_from_a_file(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(_block(number_checkpoints=2)))
    assert parse_policy(f"deepspeed:{file}") == deepspeed(_block(number_checkpoints=2))
    with pytest.raises(InvalidInputError, match=r"cannot read the DeepSpeed configuration .*missing"):
        parse_policy(f"deepspeed:{tmp_path / 'missing'}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_batch_size": 8}, "has no 'activation_checkpointing' block"),
        (_block(cpu_checkpointing=True), "cpu_checkpointing moves the inputs of regions to the host, which lowtide does not do"),
        (_block(partition_activations=True), "partition_activations splits"),
        (_block(number_checkpoint=4), "has the setting 'number_checkpoint', which is none"),
        (_block(number_checkpoints=0), "number above zero; found 0"),
    ],
)
def test_what_deepspeed_is_asked_for_and_cannot_be_done_is_an_error(config, message):
    with pytest.raises(InvalidInputError, match=message):
        deepspeed(config)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--recompute-activations", megatron_selective()),
        ("--num-layers 32 --recompute-granularity full", megatron_full()),
        ("--recompute-granularity=full --recompute-method uniform --recompute-num-layers 2", megatron_full("uniform", 2)),
        ("--recompute-method block --recompute-num-layers 3 --recompute-granularity full --bf16", megatron_full("block", 3)),
        ("--recompute-granularity selective --recompute-modules core_attn layernorm", megatron_selective("core_attn", "layernorm")),
    ],
)
def test_megatron_from_its_command_line(flags, expected):
    assert megatron(flags) == megatron(flags.split()) == parse_policy(f"megatron:{flags}") == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 32", "no flag of Megatron-LM asks for a replay"),
        ("--recompute-granularity most", "found most"),
        ("--recompute-granularity", "takes one value; found none"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers two", "found 'two'"),
        ("--recompute-granularity full --recompute-method uniform", "go together"),
        ("--recompute-activations --distribute-saved-activations", "which lowtide does not do"),
    ],
)
def test_flags_of_megatron_that_cannot_be_followed_are_an_error(flags, message):
    with pytest.raises(InvalidInputError, match=message):
        megatron(flags)
