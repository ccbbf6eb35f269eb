"""Lightning's ``Trainer`` fits under a policy, and ends with the parameters of the plain fit, bit for bit."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowtide.errors import MissingExtraError
from lowtide.integrations.lightning import callback

from ._libraries import OTHERS_WARNINGS, library

lightning = library("lightning.pytorch")
# Lightning recommends workers, other loggers and the like.
pytestmark = pytest.mark.filterwarnings(*OTHERS_WARNINGS, "ignore::UserWarning:lightning")


class Network(lightning.LightningModule):
    def __init__(self, fails_at=None):
        super().__init__()
        self.fails_at = fails_at
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Tanh(), nn.Dropout(0.2))) for _ in range(3)
        )

    def training_step(self, batch, index):
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        if index == self.fails_at:
            raise KeyError("by the test")
        return x.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def fitted(*callbacks, fails_at=None, **options):
    torch.manual_seed(0)
    network = Network(fails_at)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=1, callbacks=list(callbacks), **quiet, **options)
    try:
        trainer.fit(network, DataLoader(TensorDataset(torch.randn(16, 8)), 4))
    finally:
        assert not any("forward" in module.__dict__ for module in network.modules())
    return list(network.state_dict().values())


class Watching(lightning.Callback):
    def __init__(self, policy_callback):
        self.policy_callback, self.replay_s = policy_callback, []

    def on_train_batch_end(self, *_, **__):
        self.replay_s.append(self.policy_callback.handle.replay_seconds())


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}], ids=["plain", "bf16, accumulated"])
def test_the_callback_installs_a_policy_for_the_fit(options):
    policy = callback("full")
    watching = Watching(policy)
    found, expected = fitted(policy, watching, **options), fitted(**options)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert watching.replay_s[0] > 0
    assert watching.replay_s == sorted(watching.replay_s)
    assert policy.handle is None


def test_a_fit_that_fails_leaves_nothing_installed():
    policy = callback("full")
    with pytest.raises(KeyError, match="by the test"):
        fitted(policy, fails_at=1)
    assert policy.handle is None


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lowtide\[lightning\]'"):
        callback()
