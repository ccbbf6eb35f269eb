"""One contract over every bundled workload, at a size where a step takes milliseconds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from lowtide.workload import Workload
from lowtide.workloads import WORKLOADS, bundled
from lowtide.workloads.gpt import GPT
from lowtide.workloads.resnet import ResNet
from lowtide.workloads.unet import UNet

TINY: dict[str, dict[str, Any]] = {
    "gpt": {"blocks": 2, "width": 16, "heads": 2, "context": 16, "batch": 4, "corpus_bytes": 4096},
    "resnet": {"widths": (4, 8), "depths": (1, 2), "batch": 8, "dataset": 40},
    "unet": {"widths": (4, 8, 12), "batch": 4, "dataset": 40},
}


@pytest.fixture(params=sorted(WORKLOADS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(name: str) -> Workload:
    torch.manual_seed(7)
    return bundled(name, **TINY[name])


def losses(workload: Workload, steps: int) -> list[float]:
    return [float(workload.step()) for _ in range(steps)]  # type: ignore[arg-type]


def test_every_workload_has_a_tiny_size() -> None:
    assert TINY.keys() == WORKLOADS.keys()


def test_a_workload_says_its_name_and_hands_over_its_optimizer(name: str) -> None:
    workload = make(name)
    assert workload.name == name
    held = [id(parameter) for group in workload.optimizer.param_groups for parameter in group["params"]]
    assert held == [id(parameter) for parameter in workload.model.parameters()]


def test_the_same_random_state_gives_the_same_training(name: str) -> None:
    first = make(name)
    expected = losses(first, 3)
    second = make(name)
    assert losses(second, 3) == expected
    for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_only_torchs_generator_is_drawn_from(name: str) -> None:
    expected = losses(make(name), 2)
    random.seed(99)
    np.random.seed(99)
    state = random.getstate()
    assert losses(make(name), 2) == expected
    assert random.getstate() == state


def test_another_random_state_gives_another_batch(name: str) -> None:
    workload = make(name)
    state = {key: value.clone() for key, value in workload.model.state_dict().items()}
    first = float(workload.step())  # type: ignore[arg-type]
    workload.model.load_state_dict(state)
    assert float(workload.step()) != first  # type: ignore[arg-type]


def test_a_step_gives_every_parameter_a_gradient_and_moves_it(name: str) -> None:
    workload = make(name)
    before = {key: value.detach().clone() for key, value in workload.model.named_parameters()}
    workload.step()
    for key, parameter in workload.model.named_parameters():
        assert parameter.grad is not None, key
        assert not torch.equal(parameter, before[key]), key


def test_training_learns(name: str) -> None:
    seen = losses(make(name), 60)
    assert sum(seen[-5:]) < 0.95 * sum(seen[:5])


def test_the_transformer_looks_at_no_later_byte() -> None:
    model = make("gpt").model.eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_the_transformer_drops_at_random_while_it_trains() -> None:
    model = make("gpt").model
    tokens = torch.randint(256, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_the_transformer_counts_its_tokens_and_has_blocks_enough() -> None:
    workload = bundled("gpt", corpus_bytes=4096)
    assert workload.tokens_per_step == 16 * 128
    assert isinstance(workload.model, GPT)
    assert len(workload.model.blocks) >= 8


def test_stages_of_the_cnn_are_uneven_and_its_images_give_logits() -> None:
    model = make("resnet").model
    assert isinstance(model, ResNet)
    assert [len(stage) for stage in model.stages] == [1, 2]  # type: ignore[arg-type]
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_batch_statistics_of_the_cnn_move_with_each_step() -> None:
    workload = make("resnet")
    workload.step()
    counts = [int(value) for key, value in workload.model.named_buffers() if key.endswith("num_batches_tracked")]
    assert counts
    assert set(counts) == {1}


def test_the_u_net_gives_back_an_image() -> None:
    model = make("unet").model
    assert isinstance(model, UNet)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 3, 32, 32)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_activations_are_most_of_the_peak_at_the_default_size(name: str) -> None:
    """Saved bytes against parameters, gradients and optimizer state, which a plan cannot lower."""
    workload = bundled(name)
    workload.step()
    fixed = sum(2 * parameter.nbytes for parameter in workload.model.parameters())
    fixed += sum(value.nbytes for state in workload.optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    own = {parameter.untyped_storage().data_ptr() for parameter in workload.model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        workload.step()
    saved = sum(tensor.untyped_storage().nbytes() for pointer, tensor in held.items() if pointer not in own)
    assert saved / (saved + fixed) >= 0.75
