"""A process of a group: ``_worker.py RANK WORLD STORE REPORT FILE::CASE ...`` runs cases one after the other, up to the first that fails.

It writes a line of JSON for each: the case, and what went wrong, or ``null``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

_HERE = Path(__file__).parent
_PATIENCE = timedelta(minutes=10)
BREAKS = "_breaks"
"""How the names of cases end that leave the group in no state to be used again."""


def load(name: str) -> ModuleType:
    """A file of cases as a module."""
    spec = importlib.util.spec_from_file_location(name, _HERE / "cases" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(case: str) -> str | None:
    """What goes wrong in a case."""
    name, _, function = case.partition("::")
    torch.manual_seed(0)
    try:
        getattr(load(name), function)()
        if not function.endswith(BREAKS):
            dist.barrier()
    except BaseException:
        return traceback.format_exc()
    return None


def main(rank: int, world: int, store: str, report: Path, cases: list[str]) -> None:
    """Run the cases in this process of the group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(_HERE))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=_PATIENCE)
    for case in cases:
        error = run(case)
        with report.open("a") as file:
            file.write(json.dumps([case, error]) + "\n")
        if error is not None or case.endswith(BREAKS):
            sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
