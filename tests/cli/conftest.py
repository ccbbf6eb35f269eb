"""Scripts of users, and the command line run in-process on them."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli import app

# Folders come and go; names of scripts and modules stay in sys.modules, so each test has its own.
NUMBER = itertools.count()

NET = """
import torch
from torch import nn
from lowtide import Workload

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self, width=16, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def workload():
    model = Net()
    x = torch.randn(512, 16)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()
        return loss

    return Workload(model, step, tokens_per_step=512)
"""


@pytest.fixture
def invoke():
    """``invoke("fit", target, ...)``; the result has ``exit_code``, ``stdout``, ``stderr``."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a user's script, after the text of a small network, into a folder that is made the current one."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = "", *, net: bool = True, name: str | None = None) -> Path:
        path = tmp_path / (name or f"user_script_{next(NUMBER)}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((NET if net else "") + textwrap.dedent(text), encoding="utf-8")
        return path

    return write


@pytest.fixture
def refused(invoke):
    """Run a command that must end with status 2, a sentence, no traceback and nothing on standard output; the sentence."""

    def run(*arguments) -> str:
        result = invoke(*arguments)
        assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        return sentence.removeprefix("error: ")

    return run
