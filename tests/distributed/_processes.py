"""Cases that need several processes: one group of them runs many cases, for starting one takes longer than a case.

A case is a function ``case_…`` of a file in ``cases``, called in every process; it fails where it raises in any. After one that failed the
rest goes on in a group of new processes.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import lowtide

_HERE = Path(__file__).parent
_TIME_LIMIT_S = 1800.0

Outcomes = dict[str, list[str]]


def cases_of(*names: str) -> list[str]:
    """The cases in some files, as ``file::function``."""
    trees = {name: ast.parse((_HERE / "cases" / f"{name}.py").read_text()) for name in names}
    functions = ((name, node.name) for name, tree in trees.items() for node in tree.body if isinstance(node, ast.FunctionDef))
    return [f"{name}::{function}" for name, function in functions if function.startswith("case_")]


def run_cases(world: int, cases: list[str], folder: Path) -> Outcomes:
    """What went wrong in each case, of the processes in which something did."""
    outcomes: Outcomes = {}
    while left := [case for case in cases if case not in outcomes]:
        outcomes.update(_run_group(world, left, folder / str(len(outcomes))))
    return outcomes


def _run_group(world: int, cases: list[str], folder: Path) -> Outcomes:
    folder.mkdir()
    reports = [folder / f"report{rank}" for rank in range(world)]
    processes = [_start(world, rank, folder / "store", reports[rank], cases) for rank in range(world)]
    try:
        printed = [process.communicate(timeout=_TIME_LIMIT_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # and close its pipe
    found = [_read(report) for report in reports]
    seen = [case for case in cases if any(case in report for report in found)] or cases[:1]
    return {case: [error for rank in range(world) if (error := found[rank].get(case, printed[rank][-2000:])) is not None] for case in seen}


def _start(world: int, rank: int, store: Path, report: Path, cases: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(_HERE / "_worker.py"), str(rank), str(world), str(store), str(report), *cases]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def _read(report: Path) -> dict[str, str | None]:
    return dict(json.loads(line) for line in report.read_text().splitlines()) if report.exists() else {}
