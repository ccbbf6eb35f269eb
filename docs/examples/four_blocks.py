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
plain = lowtide.simulate(trace, None)
print(f"plain: peak {plain.peak_bytes / 2**20:.2f} MiB")
for share in (0.9, 0.75, 0.6):
    plan = lowtide.solve(trace, int(share * plain.peak_bytes))
    regions = ", ".join("+".join(region.paths) for region in plan.regions)
    print(f"{share:.0%}: peak {plan.predicted_peak_bytes / 2**20:.2f} MiB, replays {regions}")
