"""Small steps of the kinds that people train, each as ``make() -> (model, step)``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.workloads import bundled

Made = tuple[nn.Module, Callable[[], object]]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def residual_net(blocks: int = 4, width: int = 64, rows: int = 256) -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(*(Residual(width) for _ in range(blocks))), torch.randn(rows, width)


def gpt() -> Made:
    workload = bundled("gpt", blocks=2, width=32, context=32, batch=4, corpus_bytes=2**16)
    return workload.model, workload.step


def resnet() -> Made:
    workload = bundled("resnet", widths=(8, 16), depths=(1, 2), batch=8, dataset=32)
    return workload.model, workload.step


def unet() -> Made:
    workload = bundled("unet", widths=(8, 16), batch=8, dataset=32)
    return workload.model, workload.step


def no_optimizer() -> Made:
    model, x = residual_net()

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return model, step


def gradients_kept_between_steps() -> Made:
    model, x = residual_net()
    return model, lambda: model(x).square().mean().backward()


def accumulation() -> Made:
    model, x = residual_net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for part in x.chunk(4):
            (model(part).square().mean() / 4).backward()
        optimizer.step()

    return model, step


def autocast() -> Made:
    model, x = residual_net()

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()

    return model, step


class Looped(nn.Module):
    """One module called many times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual(32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return x


def shared() -> Made:
    model = Looped()
    x = torch.randn(128, 32)

    def step() -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return model, step


def gradient_penalty() -> Made:
    model, x = residual_net(blocks=2)

    def step() -> None:
        model.zero_grad()
        inputs = x.clone().requires_grad_()
        out = model(inputs).square().sum()
        (gradient,) = torch.autograd.grad(out, inputs, create_graph=True)
        (out + gradient.square().sum()).backward()

    return model, step


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank path beside it: two gradients meet at its input."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.base = nn.Linear(wide, narrow).requires_grad_(False)
        self.down = nn.Linear(wide, 4, bias=False)
        self.up = nn.Linear(4, narrow, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(F.dropout(self.down(x), 0.1, self.training))


def adapters() -> Made:
    blocks = [nn.Sequential(nn.LayerNorm(32), Adapted(32, 128), nn.GELU(), Adapted(128, 32)) for _ in range(4)]
    model, x = nn.Sequential(*blocks), torch.randn(256, 32)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return model, step


def optimizer_with_closure() -> Made:
    model, x = residual_net(blocks=3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return model, lambda: optimizer.step(closure)


def recurrent() -> Made:
    model = nn.LSTM(16, 32, num_layers=2, batch_first=True)
    x = torch.randn(8, 20, 16)

    def step() -> None:
        model.zero_grad()
        model(x)[0].square().mean().backward()

    return model, step


class Turned(nn.Module):
    """Multiplies by what is conjugated and changes sign by a mark alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return (y.conj() * x).real * y.conj().imag


def complex_numbers() -> Made:
    model, x = Turned(64), torch.randn(32, 64, dtype=torch.complex64)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return model, step


def sparse_gradients() -> Made:
    """Of an embedding: with the indices and values of the gradient, which is there from one step to the next."""
    model, tokens = nn.Sequential(nn.Embedding(500, 32, sparse=True), nn.Linear(32, 32), nn.GELU()), torch.randint(500, (16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    return model, step


def function_transforms() -> Made:
    """The gradient of a model by each of its inputs, of which a loss is made."""
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1))
    x = torch.randn(256, 32)

    def step() -> None:
        model.zero_grad()
        slopes = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
        (slopes.pow(2).sum() + model(x).sum()).backward()

    return model, step


STEPS: dict[str, Callable[[], Made]] = {
    make.__name__: make
    for make in (
        gpt,
        resnet,
        unet,
        no_optimizer,
        gradients_kept_between_steps,
        accumulation,
        autocast,
        shared,
        gradient_penalty,
        adapters,
        optimizer_with_closure,
        recurrent,
        complex_numbers,
        sparse_gradients,
        function_transforms,
    )
}
