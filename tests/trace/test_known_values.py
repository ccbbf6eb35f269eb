"""Under fake tensors, steps may look at token ids, masks and positions: the ops that they choose by them are those of the real step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import StepError
from lowtide.trace import trace

Chooses = Callable[[Tensor], Tensor]
IDS = torch.tensor([[5, 3, 8, 0], [1, 2, 0, 0]])


class Embedded(nn.Module):
    def __init__(self, choose: Chooses) -> None:
        super().__init__()
        self.table, self.choose = nn.Embedding(10, 8), choose
        self.register_buffer("padding", torch.tensor(0))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.table(self.choose(ids)))


def step_of(choose: Chooses) -> tuple[nn.Module, Callable[[], object]]:
    model, ids = Embedded(choose), IDS.clone()

    def step() -> None:
        model.zero_grad()
        model(ids).square().sum().backward()

    return model, step


def without_padding(ids: Tensor) -> Tensor:
    return ids[ids != 0]


def longest(ids: Tensor) -> Tensor:
    return ids[:, : int((ids != 0).sum(-1).max())]


def flat_if_padded(ids: Tensor) -> Tensor:
    return ids.flatten() if (ids == 0).any() else ids


def positions_if_in_order(ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1])[None].expand(2, -1)
    return positions if (positions.diff(dim=-1) == 1).all() else ids


def through_a_view(ids: Tensor) -> Tensor:
    return ids.t()[: ids.t()[0].max().item()]


CHOICES = [without_padding, longest, flat_if_padded, positions_if_in_order, through_a_view]


@pytest.mark.parametrize("choose", CHOICES, ids=lambda choose: choose.__name__)
def test_the_record_is_that_of_the_real_step(choose: Chooses) -> None:
    model, step = step_of(choose)
    real, fake = trace(model, step), trace(model, step, fake=True)
    assert [(op.name, op.source) for op in fake.ops] == [(op.name, op.source) for op in real.ops]
    assert fake.storages == real.storages


def test_values_are_known_on_a_device_that_is_not_here() -> None:
    assert trace(*step_of(without_padding), fake=True, device="cuda").ops


def written_with_what_is_not_known(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids[0] = torch.rand(4).round().long()
    return ids[ids != 0]


def written_through_a_view(ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids.view(-1)[:2].copy_(torch.randint(3, (2,)))
    return ids[ids != 0]


@pytest.mark.parametrize("choose", [written_with_what_is_not_known, written_through_a_view], ids=lambda choose: choose.__name__)
def test_what_is_written_to_is_no_longer_known(choose: Chooses) -> None:
    with pytest.raises(StepError, match="asks for a value that nobody computes"):
        trace(*step_of(choose), fake=True)


def test_the_ids_themselves_are_left_alone() -> None:
    model, ids = Embedded(without_padding), IDS.clone()

    def step() -> None:
        ids.mul_(1)
        model(ids).sum().backward()

    with pytest.raises(StepError):
        trace(model, step, fake=True)
    assert torch.equal(ids, IDS)


def test_a_library_that_leaves_out_what_depends_on_values_is_told_which_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("transformers.utils.import_utils")
    library.is_fake_tensor = lambda x: type(x).__name__ == "FakeTensor"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, library.__name__, library)
    original = library.is_fake_tensor

    def choose(ids: Tensor) -> Tensor:
        assert [library.is_fake_tensor(t) for t in (ids, ids == 0, model.table.weight)] == [False, False, True]
        return ids

    model, step = step_of(choose)
    trace(model, step, fake=True)
    assert library.is_fake_tensor is original
