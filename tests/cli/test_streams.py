"""Standard output has the result alone, however the user's code prints: Python, child processes, C, exit handlers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# A child finds lowtide where this process found it.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}

NOISE = """
import atexit, ctypes, os, subprocess, sys, threading

def make_noise(where):
    print("python", where)
    sys.__stdout__.write(f"original {where}\\n")
    os.write(1, f"descriptor {where}\\n".encode())
    subprocess.run(["echo", "child", where])
    ctypes.CDLL(None).printf(f"c {where}\\n".encode())
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=ENVIRONMENT)


def test_every_way_to_print_goes_to_standard_error():
    done = python(
        NOISE
        + """
from lowtide.cli._streams import output_kept_clean
print("before")
with output_kept_clean():
    make_noise("inside")
print("after")
ctypes.CDLL(None).printf(b"c after\\n")
"""
    )
    assert done.stdout.split("\n") == ["before", "after", "c after", ""], done.stderr
    assert {line for line in done.stderr.splitlines() if "inside" in line} == {
        f"{way} inside" for way in ("python", "original", "descriptor", "child", "c")
    }


def test_it_works_without_a_standard_output():
    done = python(
        """
import os, sys
from lowtide.cli._streams import output_kept_clean
os.close(1)
with output_kept_clean():
    sys.stderr.write("fine")
"""
    )
    assert (done.returncode, done.stderr) == (0, "fine")


def test_the_machine_report_is_alone_on_standard_output(script):
    path = script(
        NOISE
        + """
make_noise("while loading")
atexit.register(make_noise, "at exit")

def noisy():
    make_noise("in the function")
    found = workload()
    return Workload(found.model, lambda: (make_noise("in the step"), found.step())[1])
"""
    )
    done = python("from lowtide.cli import main; main()", "fit", f"{path}:noisy", "--budget", "75%", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["format"] == "lowtide.report"
    for place in ("while loading", "at exit", "in the function", "in the step"):
        assert f"child {place}" in done.stderr
        assert f"c {place}" in done.stderr
