"""Programs that went wrong one after the other: what was learned of the first calls of some code holds for the next."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from zlib import crc32

import pytest
import torch

import lowtide.engine
from lowtide.records import Decision


class KeepSome:
    """Keeps about half of the calls, whichever these are."""

    def decide(self, site):
        return Decision.KEEP if crc32(f"{site.function_name} {site.index}".encode()) % 2 else Decision.RECOMPUTE


@pytest.fixture
def made_anew(monkeypatch):
    """The functions of which programs consist, made anew: nothing is known of their code."""
    spec = importlib.util.spec_from_file_location("programs_made_anew", Path(__file__).with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_what_the_region_around_made_anew_was_not_yet_written_to(made_anew):
    line, policy = made_anew.Line, KeepSome()

    def keeping(fn):
        return lowtide.engine.checkpoint(fn, policy=policy)

    def nested(*body):
        return (line("region", body=body, returns=(-1,)),)

    def gradients_of(body, region):
        torch.manual_seed(3)
        found = []
        for _ in range(2):
            leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
            outputs = region(made_anew.as_function(body, (-1,), region))(*leaves[:2], leaves[2] * 2, torch.randn(3, 4))
            found += [gradient for gradient in made_anew.gradients("once", outputs, leaves) if gradient is not None]
        return found

    programs = [nested(*nested(line("noise"))), nested(line("chunk", 30)), (line("view", 24),), nested(line("in place"))]
    for body in programs:
        plain = gradients_of(body, lambda fn: fn)
        for one, other in zip(gradients_of(body, keeping), plain, strict=True):
            assert torch.equal(one, other)
