"""What surrounds a replay, and what it may not do."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode


def test_a_counter_of_operations_around_the_backward_sees_the_replay(api):
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def operations(run):
        out = run(lambda x: (torch.sin(x) @ weight).sin().sum())
        with FlopCounterMode(display=False) as counter:
            out.backward()
        return counter.get_total_flops()

    product = 2 * 4**3
    assert operations(lambda fn: fn(x)) == 2 * product
    for _ in range(2):
        assert operations(lambda fn: api.checkpoint(fn, x, use_reentrant=False)) == 3 * product


def test_a_replay_that_writes_to_its_input_as_the_forward_had_not(api):
    runs = []

    def fn(x):
        runs.append(1)
        if len(runs) == 2:
            x.relu_()
        return torch.sin(torch.exp(x))

    x = torch.randn(2, 2, requires_grad=True)
    out = api.checkpoint(fn, x * 1, use_reentrant=False, early_stop=False)
    with pytest.raises(api.CheckpointError):
        out.sum().backward()
