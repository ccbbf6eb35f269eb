"""The contract of ``torch.utils.checkpoint`` is tested on PyTorch's own functions and on lowtide's, by the same tests."""

from __future__ import annotations

import pytest
import torch.utils.checkpoint

import lowtide.torch_compat


@pytest.fixture(params=["torch", "lowtide"])
def api(request):
    """The module under test."""
    return torch.utils.checkpoint if request.param == "torch" else lowtide.torch_compat
