"""Goes on with a training that another process saved: ``python -m tests.training._resumed FILE PLAN``; prints the losses, in full."""

from __future__ import annotations

import sys

import torch

from ._loop import Training
from .test_resume import RECIPE

if __name__ == "__main__":
    path, plan = sys.argv[1:]
    torch.set_num_threads(1)
    training = Training(RECIPE, None if plan == "none" else plan)
    training.resume(torch.load(path, weights_only=True))
    training.run(3)
    print(*[loss.item().hex() for loss in training.losses])
