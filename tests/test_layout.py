"""Holds the source tree to the order of dependence, to short files and to sorted surfaces.

Imports are read from the syntax tree, those inside functions included, so nothing is imported to find out.
Imports under ``if TYPE_CHECKING`` count as well: what a package may know of does not depend on when it runs.

``explain`` stands right below ``plan``: it reads traces and plays plans through with ``simulate``, and needs nothing else, so a
trace can be explained where there is no torch.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"
PACKAGE = SRC / "lowtide"
LONGEST_FILE_LINES = 400

ORDER = (
    "errors",
    "units",
    "records",
    "workload",
    "plan",
    "explain",
    "_native_loading",
    "_torch_private",
    "_torch_compiler",
    "_torch_tracing",
    "_torch_groups",
    "engine",
    "torch_compat",
    "policy",
    "trace",
    "measure",
    "verify",
    "distributed",
    "integrations",
    "report",
    "_fit",
    "compiled",
    "notebook",
    "_explain",
    "cli",
)
BESIDE_THE_ORDER = {"workloads": ("workload",)}
MAY_IMPORT_WORKLOADS = ("cli",)
STRANGERS = {"engine": ("plan", "explain")}
ENTRY_POINTS = ("__init__", "__main__")

FILES = sorted(PACKAGE.rglob("*.py"))


def unit_of(file: Path) -> str:
    """The package or top-level module that a file belongs to."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def allowed(unit: str) -> set[str]:
    """The units that this one may import, itself included."""
    if unit in BESIDE_THE_ORDER:
        return {unit, *BESIDE_THE_ORDER[unit]}
    above = set(ORDER[: ORDER.index(unit) + 1]) - set(STRANGERS.get(unit, ()))
    return above | {"workloads"} if unit in MAY_IMPORT_WORKLOADS else above


def absolute(node: ast.ImportFrom, file: Path) -> str:
    """The dotted name of the module that a ``from`` import names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    package = file.relative_to(SRC).parent.parts
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported_modules(file: Path) -> set[tuple[int, str]]:
    """Line and dotted name of all that a file imports; ``from a import b`` counts as ``a.b``."""
    found: set[tuple[int, str]] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {(node.lineno, name.name) for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, file)
            found |= {(node.lineno, f"{module}.{name.name}") for name in node.names}
    return found


def imported_units(file: Path) -> set[tuple[int, str]]:
    """Line and unit of every import of lowtide itself; ``""`` where the root package is imported."""
    named = [(line, name.split(".")) for line, name in imported_modules(file)]
    return {(line, parts[1] if len(parts) > 1 else "") for line, parts in named if parts[0] == "lowtide"}


def violations(file: Path) -> list[str]:
    """The imports of a file that go against the order."""
    unit = unit_of(file)
    if unit in ENTRY_POINTS:
        return []
    may = allowed(unit)
    return [
        f"{file.relative_to(SRC)}:{line} imports {name or 'the root package'}"
        for line, name in sorted(imported_units(file))
        if name not in may
    ]


def surface(file: Path) -> list[str] | None:
    """``__all__`` of a file, if it has one written out."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))  # type: ignore[union-attr,arg-type]
    return None


def constants_then_classes_then_functions(name: str) -> tuple[int, str]:
    """The order of ruff's RUF022, which sorts ``__all__``."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_every_unit_has_its_place_in_the_order() -> None:
    known = {*ORDER, *BESIDE_THE_ORDER, *ENTRY_POINTS}
    assert {unit_of(file) for file in FILES} <= known


def test_a_package_imports_only_what_stands_above_it() -> None:
    assert [line for file in FILES for line in violations(file)] == []


# Made of the other's own parts: another front of the engine, and what looks into replays.
INSIDERS = {("torch_compat", "engine"), ("verify", "engine"), ("verify", "torch_compat")}


def test_a_package_is_used_through_its_surface() -> None:
    def is_private(name: str) -> bool:
        parts = name.split(".")
        return parts[0] == "lowtide" and len(parts) > 2 and any(part.startswith("_") for part in parts[2:])

    found = [
        f"{file.relative_to(SRC)}:{line} imports {name}"
        for file in FILES
        for line, name in imported_modules(file)
        if is_private(name) and name.split(".")[1] != unit_of(file) and (unit_of(file), name.split(".")[1]) not in INSIDERS
    ]
    assert found == []


def test_plan_names_no_torch() -> None:
    files = [file for file in FILES if unit_of(file) in ("plan", "explain", "errors", "units", "records")]
    assert [f"{file.name}:{line}" for file in files for line, name in imported_modules(file) if name.split(".")[0] == "torch"] == []


def test_what_takes_long_to_import_is_imported_when_it_is_used():
    code = "import sys, lowtide; print(*sorted({'scipy.optimize', 'plotly', 'rich', 'typer', 'torch._dynamo'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SRC)})
    assert done.stdout.split() == []


def test_plan_is_imported_where_there_is_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import lowtide.plan, lowtide.explain"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SRC)})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_is_short_and_says_what_it_is_for(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= LONGEST_FILE_LINES
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("file", [file for file in FILES if surface(file) is not None], ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_written_surface_is_sorted(file: Path) -> None:
    names = surface(file)
    assert names == sorted(set(names or ()), key=constants_then_classes_then_functions)


def test_the_order_is_enforced_on_what_it_forbids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading of imports sees through functions, relative imports and the type-checking block."""
    file = tmp_path / "lowtide" / "engine" / "_probe.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "from ..records import Op\n"
        "def f():\n    import lowtide.plan\n    from lowtide import trace\n"
        "if TYPE_CHECKING:\n    from .. import cli\n"
        "import lowtide\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SRC", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "lowtide")
    assert [line.split(" ", 1)[1] for line in violations(file)] == [
        "imports plan",
        "imports trace",
        "imports cli",
        "imports the root package",
    ]
