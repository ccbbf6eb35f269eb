"""The state of random generators is read once until somebody draws: its memory is compared, in the compiled engine and in Python."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import pytest
import torch

from lowtide.engine import _acceleration
from lowtide.engine._guards import _random

native = _acceleration.native
needs_native = pytest.mark.skipif(native is None, reason="the engine was not compiled here, or LOWTIDE_NATIVE=0 says so")


@needs_native
def test_memory_is_compared_whole() -> None:
    assert native is not None
    memory = ctypes.create_string_buffer(b"abcdef", 6)
    address = ctypes.addressof(memory)
    assert native.is_at(address, b"abcdef")
    assert not native.is_at(address, b"abcdeg")
    assert not native.is_at(address, b"Abcdef")
    memory[5] = b"x"
    assert not native.is_at(address, b"abcdef")
    state = b"abcdex"
    before = sys.getrefcount(state), sys.getrefcount(address)
    for _ in range(50):
        assert native.is_at(address, state)
    assert (sys.getrefcount(state), sys.getrefcount(address)) == before
    for wrong in ((address,), (address, "abcdef"), (1.5, b""), (None, b"")):
        with pytest.raises(TypeError):
            native.is_at(*wrong)
    with pytest.raises(ValueError, match="nothing"):
        native.is_at(0, b"a")


DRAWS: list[Callable[[], object]] = [
    *(lambda: torch.rand(1), lambda: torch.rand(624), lambda: torch.rand(624 * 3), lambda: torch.randn(1), lambda: torch.randperm(3)),
    *(lambda: torch.manual_seed(5), lambda: torch.nn.functional.dropout(torch.ones(3), 0.5), lambda: torch.normal(0.0, torch.ones(1))),
    lambda: torch.set_rng_state(torch.Generator().manual_seed(8).get_state()),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the states of devices are read each time")
@pytest.mark.parametrize("draw", DRAWS)
def test_random_state_is_read_once_until_somebody_draws(draw: Callable[[], object]) -> None:
    torch.manual_seed(3)
    _random.take_random()
    first = _random.take_random()
    assert first[0] == _random.take_cpu()
    assert _random.take_random() is first
    assert not _random.moved(first)
    wanted = torch.get_rng_state()
    draw()
    assert _random.moved(first)
    second = _random.take_random()
    assert second[0] == _random.take_cpu() != first[0]
    assert not _random.moved(second)
    assert _random.moved(first)
    _random.put_random(first)
    assert torch.equal(torch.get_rng_state(), wanted)
    assert not _random.moved(first)
    assert _random.take_random()[0] == first[0]


def test_what_is_left_of_used_samples_is_no_draw() -> None:
    torch.manual_seed(3)
    torch.randn(1)  # makes two, and keeps one
    before = _random.take_random()
    torch.randn(1)
    torch.set_rng_state(torch.get_rng_state())
    assert _random.moved(before)
