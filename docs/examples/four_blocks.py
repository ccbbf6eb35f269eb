import torch
from torch import nn

import lowtide

blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
model = nn.Sequential(*blocks)
x = torch.randn(1024, 64)


def step():
    model.zero_grad()
    model(x).square().mean().backward()


trace = lowtide.trace(model, step)
for replayed in ("", "3", "0", "0 1", "0 1 2", "0 1 2 3"):
    regions = [lowtide.PlannedRegion((path,)) for path in replayed.split()]
    simulation = lowtide.simulate(trace, regions)
    print(f"replayed: {replayed or 'none':8} peak: {simulation.peak_bytes / 2**20:5.2f} MiB")
