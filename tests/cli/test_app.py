"""The command itself: version, help, and its name in the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch


def test_the_version_is_printed(invoke):
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(rf"lowtide (\d+\.\d+\S*|\(not installed\)) \(torch {re.escape(torch.__version__)}\)\n", result.stdout)


@pytest.mark.parametrize("command", [(), ("fit",), ("demo",), ("show-plan",), ("trace",), ("explain",), ("report",), ("bench",)])
def test_every_command_has_help(invoke, command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_an_unknown_command_is_refused(invoke):
    result = invoke("fti", "gpt")
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "lowtide.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("lowtide ")
