"""PEFT: adapters are trained, the base is frozen, and no input of a layer needs a gradient but for the adapters before it."""

from __future__ import annotations

import functools

import pytest

import lowtide
from lowtide.integrations.transformers import enable

from ._families import make, same, train
from ._libraries import OTHERS_WARNINGS, library

library("transformers")
peft = library("peft")
pytestmark = pytest.mark.filterwarnings(*OTHERS_WARNINGS)

TASKS = {"llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM"}


def adapted(family, kind):
    model, batch = make(family, use_cache=False)
    task = TASKS[family]
    lora = {"r": 4, "lora_dropout": 0.1, "init_lora_weights": False, "task_type": task, "fan_in_fan_out": family == "gpt2"}
    configs = {
        "lora": lambda: peft.LoraConfig(**lora),
        "dora": lambda: peft.LoraConfig(use_dora=True, **lora),
        "ia3": lambda: peft.IA3Config(task_type=task, fan_in_fan_out=family == "gpt2"),
        "prompt": lambda: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3),
        "prefix": lambda: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
    }
    return peft.get_peft_model(model, configs[kind]()).train(), batch


@functools.cache
def plain(family, kind):
    return train(*adapted(family, kind))


@pytest.fixture(params=TASKS)
def family(request):
    return request.param


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prompt", "prefix"])
def test_replayed_layers_change_no_bit(family, kind):
    model, batch = adapted(family, kind)
    handle = enable(model)
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    assert same(train(model, batch), plain(family, kind))
    assert handle.replay_seconds() > 0
    assert all(parameter.grad is None for parameter in frozen)
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_their_own_checkpointing_runs_on_this_engine(family, kind):
    model, batch = adapted(family, kind)
    base = model.base_model
    with lowtide.torch_compat.substituted():
        getattr(base, "activation_checkpointing_enable", base.gradient_checkpointing_enable)()
        assert same(train(model, batch), plain(family, kind))
