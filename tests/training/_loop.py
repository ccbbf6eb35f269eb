"""A training loop with what people put into one; the same with and without regions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lowtide

WIDTH = 16
PLANS: list[Any] = [
    "full",
    "selective",
    lowtide.policy.keep(lowtide.policy.op("aten.addmm")),
]


class Block(nn.Module):
    """Attention, a feed-forward part with batch statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.statistics, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1)), 0.1, self.training)
        return x + self.down(F.gelu(self.statistics(self.up(x).transpose(1, 2)).transpose(1, 2)))


class Model(nn.Module):
    """Three blocks, and a head whose output is compared with the next row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


@dataclass(frozen=True)
class Recipe:
    """How it is trained.

    Attributes:
        precision: makes the context of the forward.
        scaled: gradients are scaled by a ``GradScaler``.
        pieces: into which a batch is cut for gradient accumulation.
        clip: largest norm of all gradients.
        in_backward: each parameter is updated as soon as its gradient is there, and the gradient dropped.
        exits_early: backward runs outside of the precision's context.
        compiled: the model is compiled.
    """

    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaled: bool = False
    pieces: int = 1
    clip: float | None = None
    in_backward: bool = False
    exits_early: bool = True
    compiled: bool = False


class Training:
    """A model in training; what it did so far is in ``losses``."""

    def __init__(self, recipe: Recipe, plan: Any = None, model: Callable[[], nn.Module] = Model) -> None:
        torch.manual_seed(0)
        self.recipe, self.model = recipe, model()
        self.run_model = torch.compile(self.model, backend="aot_eager") if recipe.compiled else self.model
        self.handle = None if plan is None else lowtide.apply(self.model, plan)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if recipe.scaled else None
        self.losses: list[torch.Tensor] = []
        parameters = list(self.model.parameters())
        groups = [[p] for p in parameters] if recipe.in_backward else [parameters]
        self.optimizers = [torch.optim.AdamW(group, lr=1e-2) for group in groups]
        if recipe.in_backward:
            for parameter, optimizer in zip(parameters, self.optimizers, strict=True):
                parameter.register_post_accumulate_grad_hook(_updating(optimizer))

    def run(self, steps: int) -> None:
        """Train on."""
        for _ in range(steps):
            self._step(torch.randn(4, 6, WIDTH))

    def _step(self, batch: torch.Tensor) -> None:
        total = torch.zeros(())
        for piece in batch.chunk(self.recipe.pieces):
            total += self._backward(piece)
        self.losses.append(total)
        if not self.recipe.in_backward:
            self._update()

    def _backward(self, piece: torch.Tensor) -> torch.Tensor:
        with self.recipe.precision():
            loss = F.mse_loss(self.run_model(piece)[:, :-1], piece[:, 1:]) / self.recipe.pieces
            if not self.recipe.exits_early:
                self._scaled(loss).backward()
        if self.recipe.exits_early:
            self._scaled(loss).backward()
        return loss.detach().float()

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _update(self) -> None:
        (optimizer,) = self.optimizers
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if self.recipe.clip is not None:
            self.losses.append(nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip))
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()

    def checkpoint(self) -> dict[str, Any]:
        """All that it takes to go on elsewhere, as people save it."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "scaler": None if self.scaler is None else self.scaler.state_dict(),
                "random": torch.get_rng_state(),
            }
        )

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where another left off."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"])

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that training has made of it."""
        yield from self.losses
        yield from self.model.state_dict().values()
        if self.scaler is not None:
            yield torch.tensor(self.scaler.get_scale())
        yield torch.get_rng_state()


def _updating(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def update(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def assert_same(found: Training, expected: Training) -> None:
    """To the last bit."""
    for one, other in zip(found.tensors(), expected.tensors(), strict=True):
        assert torch.equal(one, other)
