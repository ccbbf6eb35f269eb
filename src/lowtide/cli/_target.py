"""From what the user typed to the workload that they meant.

A target is a bundled name, ``path/to/script.py:function`` or ``package.module:function``. The folder of a script
(for a module, the current folder) is on ``sys.path`` for as long as the workload is in use, since imports inside
functions run late. Whatever goes wrong in the user's own code passes through unchanged.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from lowtide.errors import TargetError
from lowtide.workload import Workload

_FORMS = "write gpt, resnet or unet, path/to/script.py:function or package.module:function"


@contextmanager
def loaded(target: str) -> Iterator[Workload]:
    """The workload of a target, its folder importable meanwhile.

    Raises:
        TargetError: there is no such target, or it yields no workload.
        Exception: whatever the user's code raises.
    """
    import torch

    torch.manual_seed(0)  # two runs of one command build the same model
    if ":" not in target:
        yield _bundled(target)
        return
    place, _, function = target.rpartition(":")
    _refuse_no_function(target, place, function)
    is_script = _is_script(place)
    with _importable(Path(place).resolve().parent if is_script else Path.cwd()):
        module = _script(place) if is_script else _module(place)
        yield _call(_function(module, place, function), target)


def _bundled(name: str) -> Workload:
    from lowtide.workloads import WORKLOADS, bundled

    if name in WORKLOADS:
        return bundled(name)
    if name and Path(name).is_dir():
        raise TargetError(f"the target {name} is a directory: {_FORMS}")
    if name and _is_script(name):
        raise TargetError(f"the target {name} names no function: write {name}:function, a function that returns a lowtide.Workload")
    close = get_close_matches(name, WORKLOADS, n=1)
    hint = f"did you mean {close[0]}?" if close else _FORMS
    raise TargetError(f"there is no bundled workload {name!r} ({', '.join(WORKLOADS)} are there): {hint}")


def _refuse_no_function(target: str, place: str, function: str) -> None:
    if not place or not all(part.isidentifier() for part in function.split(".")):
        raise TargetError(f"the target {target!r} names no function after the colon: {_FORMS}")


def _is_script(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place or Path(place).exists()


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def _script(place: str) -> ModuleType:
    path = Path(place)
    if path.is_dir():
        raise TargetError(f"the target {place} is a directory: name a Python file in it, {path / 'script.py'}:function")
    if not path.exists():
        raise TargetError(f"there is no file {place} (looked in {path.absolute().parent})")
    if path.suffix != ".py":
        raise TargetError(f"the target {place} is no Python file: its name must end in .py")
    return _run(path.resolve(), _source(path))


def _source(path: Path) -> bytes:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise TargetError(f"cannot read the target {path}: {error.strerror or error}") from error
    if b"\0" in source:
        raise TargetError(f"the target {path} is no Python source: it holds null bytes")
    return source


def _run(path: Path, source: bytes) -> ModuleType:
    """Run a script as a module, not as ``__main__``; registered, since dataclasses and pickle look modules up by name."""
    module = ModuleType(f"lowtide_target_{path.stem}")
    module.__file__, module.__package__ = str(path), ""
    sys.modules[module.__name__] = module
    exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    return module


def _module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise TargetError(f"{name!r} is neither a Python file nor the name of a module: {_FORMS}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(f"there is no module {error.name!r} (looked in {Path.cwd()} and on Python's path)") from None
        raise


def _function(module: ModuleType, place: str, function: str) -> Any:
    found: Any = module
    for part in function.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{place} has no function {function!r}{_suggestion(module, function)}")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"{place}:{function} is a {_kind(found)}, not a function: it must be a function that returns a lowtide.Workload")
    return found


def _suggestion(module: ModuleType, function: str) -> str:
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    shown = get_close_matches(function, names, n=1) or sorted(names)[:5]
    return f": it has {', '.join(shown)}" if shown else ": it defines no function"


def _call(function: Any, target: str) -> Workload:
    missing = _required_arguments(function)
    if missing:
        raise TargetError(f"{target} needs arguments ({', '.join(missing)}): it is called without any, so give them defaults")
    found = function()
    if inspect.iscoroutine(found):
        found.close()
    if not isinstance(found, Workload):
        raise TargetError(f"{target} returned a {_kind(found)}: it must return a lowtide.Workload(model, step)")
    _check(found, target)
    return found


def _check(workload: Workload, target: str) -> None:
    from torch import nn
    from torch.optim import Optimizer

    tokens = workload.tokens_per_step
    checks = (
        ("model", "a torch.nn.Module", workload.model, isinstance(workload.model, nn.Module)),
        ("step", "a function without arguments", workload.step, callable(workload.step)),
        ("optimizer", "a torch.optim.Optimizer or None", workload.optimizer, isinstance(workload.optimizer, (Optimizer, type(None)))),
        ("tokens_per_step", "a whole number above zero or None", tokens, tokens is None or (isinstance(tokens, int) and tokens > 0)),
    )
    for name, required, value, is_right in checks:
        if not is_right:
            raise TargetError(f"the {name} of the Workload that {target} returned must be {required}; found {value!r:.80}")
    missing = _required_arguments(workload.step)
    if missing:
        raise TargetError(
            f"the step of the Workload that {target} returned needs arguments ({', '.join(missing)}): it is called without any"
        )


def _required_arguments(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature: the call itself will tell
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty and parameter.kind not in optional]


def _kind(value: object) -> str:
    return type(value).__qualname__
