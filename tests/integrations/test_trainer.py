"""The ``Trainer`` of transformers trains under a policy, and ends with the parameters of the plain training, bit for bit."""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide.engine import refuse_installed
from lowtide.errors import AlreadyAppliedError
from lowtide.integrations.transformers import trainer_callback

from ._families import make, same
from ._libraries import OTHERS_WARNINGS, library

T = library("transformers")
library("accelerate")
pytestmark = pytest.mark.filterwarnings(*OTHERS_WARNINGS)


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(10) + index + 1
        return {"input_ids": tokens, "labels": tokens}


class Watching(T.TrainerCallback):
    """Notes what is installed at each step."""

    def __init__(self, callback):
        self.callback, self.regions = callback, []

    def on_step_end(self, *_, **__):
        self.regions.append(len(self.callback.handle.regions))


def trained(folder, callbacks=(), **options):
    model, _ = make("llama", use_cache=False)
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "no"}
    arguments = T.TrainingArguments(str(folder), max_steps=4, per_device_train_batch_size=2, **quiet, **options)
    T.Trainer(model, arguments, train_dataset=Sentences(), callbacks=[*callbacks]).train()
    return model, list(model.state_dict().values())


OPTIONS = [{}, {"gradient_accumulation_steps": 2, "bf16": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "bf16, accumulated"])
def test_the_callback_installs_a_policy_for_the_training(tmp_path, options):
    callback = trainer_callback("full")
    watching = Watching(callback)
    model, found = trained(tmp_path, [callback, watching], **options)
    assert same(found, trained(tmp_path, **options)[1])
    assert watching.regions == [3] * 4
    assert callback.handle is None
    refuse_installed(model.named_modules())


def test_a_training_that_failed_leaves_nothing_in_the_way_of_the_next(tmp_path):
    class Failing(T.TrainerCallback):
        def on_step_begin(self, *_, **__):
            if fails:
                raise KeyError("by the test")

    fails, callback = True, trainer_callback("full")
    model, _ = make("llama", use_cache=False)
    arguments = T.TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no")
    trainer = T.Trainer(model, arguments, train_dataset=Sentences(), callbacks=[callback, Failing()])
    with pytest.raises(KeyError, match="by the test"):
        trainer.train()
    fails = False
    trainer.train()
    assert callback.handle is None


def test_the_trainers_own_checkpointing_beside_it_is_refused(tmp_path):
    with pytest.raises(AlreadyAppliedError, match="would replay what this replays once more"):
        trained(tmp_path, [trainer_callback("full")], gradient_checkpointing=True)


def test_the_trainers_own_checkpointing_runs_on_this_engine(tmp_path):
    with lowtide.torch_compat.substituted():
        _, found = trained(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert same(found, trained(tmp_path)[1])
