import torch
from torch import nn

from lowtide import Workload


def workload() -> Workload:
    layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(6)]
    model = nn.Sequential(*layers)
    x = torch.randn(8, 64, 64)

    def step() -> None:
        model.zero_grad()
        (model(x) - x).square().mean().backward()

    return Workload(model, step, tokens_per_step=8 * 64, name="six encoder layers")
