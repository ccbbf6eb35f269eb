import torch
from torch import nn

import lowtide


def block():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


model = nn.Sequential(*[block() for _ in range(4)])
x = torch.randn(1024, 64)


def step():
    model.zero_grad()
    model(x).square().mean().backward()


trace = lowtide.trace(model, step)
for replayed in ("", "3", "0", "0 1", "0 1 2", "0 1 2 3"):
    regions = [lowtide.PlannedRegion((path,)) for path in replayed.split()]
    peak_bytes = lowtide.simulate(trace, regions).peak_bytes
    print(f"replayed: {replayed or 'none':8} peak: {peak_bytes / 2**20:5.2f} MiB")
