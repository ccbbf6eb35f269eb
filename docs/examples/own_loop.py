import torch
from torch import nn

import lowtide


def block():
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256))


model = nn.Sequential(*[block() for _ in range(8)], nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(512, 256), torch.randint(10, (512,))


def step():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


result = lowtide.fit(model, step, budget="80%")
print(result.verified, result.traced_peak_bytes, result.peak_bytes)

for _ in range(3):  # train as before: the plan is installed
    step()

result.handle.remove()  # or keep it
