"""What function modes of lowtide have in common: replays do not run under those of the forward."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode


class Between(TorchFunctionMode):
    """A function mode of lowtide."""
