"""An error in the user's code is shown as theirs: file and line first, their traceback without lowtide's frames, status 2."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import lowtide.cli._fit
from lowtide.errors import PlanError


@pytest.fixture
def blamed(invoke):
    """Fit a target whose own code fails; the sentence, and the traceback under it."""

    def run(target, *more):
        result = invoke("fit", target, "--budget", "50%", *more)
        assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
        assert result.stdout == ""
        sentence = next(line for line in result.stderr.splitlines() if line.startswith("error: "))
        return sentence.removeprefix("error: "), result.stderr.split(sentence, 1)[1]

    return run


def line_of(path, text):
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_an_error_in_forward_names_its_line_and_hides_lowtide(blamed, script, flags):
    path = script(
        """
        class Broken(Net):
            def forward(self, x):
                return super().forward(x) @ x  # wrong shapes

        def build():
            model, x = Broken(), torch.randn(8, 16)
            return Workload(model, lambda: model(x).sum().backward())
        """
    )
    sentence, traceback = blamed(f"{path}:build", *flags)
    assert sentence.startswith(f"your code raised an error at {path}:{line_of(path, '# wrong shapes')}: RuntimeError: mat1 and mat2")
    files = re.findall(r'File "(.*?)"', traceback)
    assert files == [str(path), str(path)]  # the step, then forward


def test_an_error_deep_in_torch_is_blamed_on_the_line_that_called_it(blamed, script):
    path = script(
        """
        def build():
            model = Net()
            def step():
                return model(torch.randn(8, 7))  # seven is not sixteen
            return Workload(model, step)
        """
    )
    sentence, traceback = blamed(f"{path}:build")
    assert f"{path}:{line_of(path, 'self.up(x)')}: RuntimeError" in sentence
    assert "seven is not sixteen" in traceback
    assert "_call_impl" not in traceback


def test_an_error_in_the_function_of_the_target(blamed, script):
    path = script("def build(): raise KeyError('no data')")
    sentence, traceback = blamed(f"{path}:build")
    assert f"{path}:{line_of(path, 'no data')}: KeyError: 'no data'" in sentence
    assert traceback.count("File ") == 1


def test_the_cause_of_an_error_is_shown_without_lowtide_too(blamed, script):
    path = script(
        """
        def build():
            try:
                open("no such file")
            except OSError as error:
                raise RuntimeError("cannot build") from error
        """
    )
    sentence, traceback = blamed(f"{path}:build")
    assert "RuntimeError: cannot build" in sentence
    assert "FileNotFoundError" in traceback
    assert "direct cause" in traceback
    assert "lowtide/cli" not in traceback


def test_an_error_while_a_script_is_loaded(blamed, script):
    path = script("import no_such_library_anywhere")
    sentence, _ = blamed(f"{path}:build")
    assert f"{path}:{line_of(path, 'no_such_library')}: ModuleNotFoundError: No module named 'no_such_library_anywhere'" in sentence


def test_a_module_with_a_missing_import_of_its_own_is_not_called_missing(blamed, script):
    path = script("import no_such_library_either", name="has_bad_import.py", net=False)
    sentence, _ = blamed("has_bad_import:build")
    assert f"{path}:1: ModuleNotFoundError" in sentence


@pytest.mark.parametrize("in_helper", [False, True])
def test_a_syntax_error_names_the_file_that_has_it(blamed, script, in_helper):
    path = script("x = 1\ndef build(:\n", net=False, name="helper_with_bad_syntax.py" if in_helper else None)
    target = script("import helper_with_bad_syntax", net=False) if in_helper else path
    sentence, _ = blamed(f"{target}:build")
    assert sentence.startswith(f"your code raised an error at {path}:2: SyntaxError")


def test_a_relative_import_in_a_script_gets_a_hint(blamed, script):
    path = script("from . import helper", net=False)
    sentence, _ = blamed(f"{path}:build")
    assert "ImportError: attempted relative import" in sentence
    assert "package.module:function" in sentence


@pytest.mark.parametrize(
    "body",
    [
        "import sys\nsys.exit(3)  # out",
        "def build():\n    raise SystemExit(0)  # out",
        "def build():\n    def step():\n        quit()  # out\n    return Workload(Net(), step)",
    ],
)
def test_a_script_that_ends_the_program_is_told_so(refused, script, body):
    path = script(body)
    sentence = refused("fit", f"{path}:build", "--budget", "50%")
    assert sentence.startswith(f"your code ended the program at {path}:{line_of(path, '# out')} (sys.exit")


def test_an_error_that_cannot_be_printed_is_still_reported(blamed, script):
    path = script(
        """
        class Rude(Exception):
            def __str__(self):
                raise ValueError

        def build(): raise Rude
        """
    )
    sentence, _ = blamed(f"{path}:build")
    assert f"{path}:{line_of(path, 'raise Rude')}" in sentence


def test_an_interrupt_ends_with_its_own_status(invoke, script):
    result = invoke("fit", f"{script('def build(): raise KeyboardInterrupt')}:build", "--budget", "50%")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.endswith("interrupted\n")


def test_a_fault_of_lowtide_is_called_one_and_shown_in_full(invoke, script, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    broken.__code__ = broken.__code__.replace(co_filename=lowtide.cli._fit.__file__)
    monkeypatch.setattr("lowtide._fit.fit", broken)
    result = invoke("fit", f"{script()}:workload", "--budget", "50%")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "a fault of lowtide" in result.stderr


def test_an_error_of_lowtide_is_its_sentence(refused, script, monkeypatch):
    def refuses(*_, **__):
        raise PlanError("this is what is wrong")

    monkeypatch.setattr("lowtide._fit.fit", refuses)
    assert refused("fit", f"{script()}:workload", "--budget", "50%") == "this is what is wrong"


def test_a_step_that_never_calls_backward(refused, script):
    path = script("def build():\n    model = Net()\n    return Workload(model, lambda: model(torch.randn(8, 16)))")
    assert "backward" in refused("fit", f"{path}:build", "--budget", "50%")


def test_a_model_with_nothing_to_replay(refused, script):
    path = script(
        "def build():\n    model = nn.Linear(4, 4)\n    return Workload(model, lambda: model(torch.randn(8, 4)).sum().backward())"
    )
    assert "nothing to replay" in refused("fit", f"{path}:build", "--budget", "50%")


def test_an_error_inside_a_library_is_blamed_on_the_line_that_called_it(blamed, script):
    path = script("import numpy\ndef build():\n    return numpy.fft.fft(numpy.zeros(3), n=-1)  # in numpy")
    sentence, traceback = blamed(f"{path}:build")
    assert f"{path}:{line_of(path, '# in numpy')}: ValueError" in sentence
    assert "numpy" in traceback


def test_endless_recursion_is_reported_in_few_lines(blamed, script):
    path = script("def build():\n    return build()")
    sentence, traceback = blamed(f"{path}:build")
    assert "RecursionError" in sentence
    assert len(traceback.splitlines()) < 40


def test_a_file_with_null_bytes_is_no_source(refused, tmp_path):
    (tmp_path / "binary.py").write_bytes(b"\0\1\2")
    assert "null bytes" in refused("fit", f"{tmp_path / 'binary.py'}:workload", "--budget", "50%")


def test_a_coroutine_is_no_workload(refused, script):
    path = script("async def later():\n    return workload()\n")
    assert "returned a coroutine" in refused("fit", f"{path}:later", "--budget", "50%")


def test_a_report_is_a_page_or_a_picture(refused, script, tmp_path):
    said = refused("fit", f"{script()}:workload", "--budget", "50%", "--report", str(tmp_path / "report.pdf"))
    assert ".html or .png or .svg" in said


def test_a_plan_that_names_a_module_which_the_model_lacks(refused, script, tmp_path, invoke):
    plan = tmp_path / "plan.json"
    assert invoke("fit", f"{script()}:workload", "--budget", "70%", "--plan", str(plan)).exit_code == 0
    text = plan.read_text()
    first = lowtide.Plan.load(plan).regions[0].paths[0]
    plan.write_text(text.replace(f'"{first}"', '"not.there"', 1))
    assert "not.there" in refused("show-plan", str(plan), f"{script()}:workload")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_nobody_reads_the_output_to_its_end(tmp_path, options):
    model = nn.Linear(2, 2)
    lowtide.trace(model, lambda: model(torch.ones(1, 2)).sum().backward()).save(tmp_path / "step.json")
    command = [sys.executable, "-m", "lowtide", "explain", str(tmp_path / "step.json"), "-s", "peak", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        said = running.stderr.read()
    assert (running.returncode, said.splitlines()[1:]) == (141, [])  # the first line is of progress
