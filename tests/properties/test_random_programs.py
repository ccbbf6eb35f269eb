"""Whatever a region does, outputs, gradients and random state equal those of the plain run, bit for bit."""

from __future__ import annotations

from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

import lowtide
import lowtide.engine
import lowtide.torch_compat
from lowtide.records import Decision

from .conftest import PROGRAMS, Program


def _bits(value):
    return None if value is None else value.contiguous().reshape(-1).view(torch.uint8).tolist()


def _plain(fn):
    return fn


def _compat(fn):
    return lambda *args: lowtide.torch_compat.checkpoint(fn, *args, use_reentrant=False)


def _reference(run, program):
    """The plain run. Programs that autograd itself refuses are none."""
    try:
        return run(program, _plain)
    except RuntimeError:
        assume(False)


def _checkpointed(run, program, region):
    """The checkpointed run. What ends a replay must not get out of it; hypothesis would not look into that further."""
    try:
        return run(program, region)
    except Exception:
        raise
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__} got out") from error


class _KeepSome:
    """Keeps about half of the calls, whichever these are."""

    def decide(self, site):
        return Decision.KEEP if crc32(f"{site.function_name} {site.index}".encode()) % 2 else Decision.RECOMPUTE


def _keeping(fn):
    return lowtide.engine.checkpoint(fn, policy=_KEEP_SOME)


_KEEP_SOME = _KeepSome()


@pytest.mark.parametrize("region", [lowtide.checkpoint, _compat, _keeping], ids=["lowtide", "torch_compat", "keeping"])
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(program=PROGRAMS)
def test_a_random_program(run, region, program: Program):
    plain = _reference(run, program)
    found = _checkpointed(run, program, region)
    assert len(found) == len(plain)
    for index, (one, other) in enumerate(zip(found, plain, strict=True)):
        assert _bits(one) == _bits(other), f"value {index}: {one} is not {other}"
