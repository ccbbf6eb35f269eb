"""Whatever is typed as a target, the command says in one sentence what is wrong with it, and ends with status 2."""

from __future__ import annotations

import sys

import pytest

from lowtide import Workload
from lowtide.cli._target import loaded
from lowtide.errors import TargetError


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("gtp", "there is no bundled workload 'gtp' (gpt, resnet, unet are there): did you mean gpt?"),
        ("alexnet", "there is no bundled workload 'alexnet'"),
        ("", "there is no bundled workload ''"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("no/where.py:f", "there is no file no/where.py"),
        ("nowhere.py", "names no function"),
        ("C:\\models\\train.py:build", "there is no file C:\\models\\train.py"),
        ("C:\\models\\train.py", "names no function after the colon"),
        (":build", "names no function after the colon"),
        ("train.py:", "names no function after the colon"),
        ("train.py:build()", "names no function after the colon"),
        ("no_such_package.module:build", "there is no module 'no_such_package'"),
        ("json.no_such:build", "there is no module 'json.no_such'"),
        ("not a module:build", "is neither a Python file nor the name of a module"),
        ("json:no_such", "json has no function 'no_such'"),
        ("json:dumps", "json:dumps needs arguments (obj)"),
        ("json:__name__", "is a str, not a function"),
        ("os:getcwd", "os:getcwd returned a str: it must return a lowtide.Workload"),
    ],
)
def test_a_target_that_is_none_is_refused(refused, script, target, says):
    assert says in refused("fit", target, "--budget", "50%")


def test_a_directory_is_refused(refused, script, tmp_path):
    (tmp_path / "models").mkdir()
    assert "is a directory" in refused("fit", "models", "--budget", "50%")
    assert "is a directory" in refused("fit", "models:build", "--budget", "50%")
    assert "is a directory" in refused("fit", f"{tmp_path}:build", "--budget", "50%")


def test_a_file_that_is_no_python_is_refused(refused, script):
    path = script("{}", net=False, name="notebook.ipynb")
    assert "no Python file" in refused("fit", f"{path}:build", "--budget", "50%")


def test_a_script_without_a_function_is_told_how_to_name_one(refused, script):
    path = script()
    assert f"write {path}:function" in refused("fit", path, "--budget", "50%")


def test_close_function_names_are_suggested(refused, script):
    path = script()
    assert refused("fit", f"{path}:worklod", "--budget", "50%").endswith("has no function 'worklod': it has workload")
    empty = script("x = 1", net=False)
    assert refused("fit", f"{empty}:f", "--budget", "50%").endswith("it defines no function")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("def f(): return Net()", "returned a Net"),
        ("def f(): return None", "returned a NoneType"),
        ("async def f(): return workload()", "returned a coroutine"),
        ("def f(width): return workload()", "needs arguments (width)"),
        ("def f(*, width): return workload()", "needs arguments (width)"),
        ("def f(): return Workload(7, print)", "the model of the Workload"),
        ("def f(): return Workload(Net(), None)", "the step of the Workload"),
        ("def f(): return Workload(Net(), lambda batch: None)", "needs arguments (batch)"),
        ("def f(): return Workload(Net(), print, optimizer='adam')", "the optimizer of the Workload"),
        ("def f(): return Workload(Net(), print, tokens_per_step=-1)", "the tokens_per_step of the Workload"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_what_a_function_returns_is_checked(refused, script, body, says):
    assert says in refused("fit", f"{script(body)}:f", "--budget", "50%")


def test_a_script_is_loaded_with_its_folder_importable(script, tmp_path):
    script("WIDTH = 24", net=False, name="elsewhere/beside_the_script.py")
    path = script(
        """
        from beside_the_script import WIDTH

        def build():
            import beside_the_script  # late imports work as well
            return Workload(Net(beside_the_script.WIDTH), workload().step, name=__name__)
        """,
        name="elsewhere/with_import.py",
    )
    before = list(sys.path)
    with loaded(f"{path}:build") as found:
        assert isinstance(found, Workload)
        assert found.model.blocks[0].up.in_features == 24
        assert found.name != "__main__"
        assert sys.path[0] == str(path.parent)
    assert sys.path == before


def test_a_module_is_found_from_the_current_folder(script):
    script("", name="models_of_mine/__init__.py", net=False)
    script("", name="models_of_mine/small.py")
    with loaded("models_of_mine.small:workload") as found:
        assert found.tokens_per_step == 512


def test_defaults_methods_and_nested_names_are_called(script):
    path = script(
        """
        class Models:
            @staticmethod
            def small(width=16, *rest, **more):
                return workload()
        """
    )
    with loaded(f"{path}:Models.small") as found:
        assert isinstance(found, Workload)


def test_the_same_command_builds_the_same_model(script):
    path = script()
    states = []
    for _ in range(2):
        with loaded(f"{path}:workload") as found:
            states.append(found.model.state_dict())
    assert all((states[0][name] == states[1][name]).all() for name in states[0])


def test_a_script_that_cannot_be_read_is_refused(script, monkeypatch):
    path = script()
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(TargetError, match=r"cannot read the target .*: Permission denied"), loaded(f"{path}:workload"):
        pass
