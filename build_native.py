"""Compiles the inner loops of the engine and of the tracer as lowtide is built or installed; where that fails, their twins in Python run.

python build_native.py      compiles them in place, for working on them
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setuptools import Distribution, Extension

ROOT = Path(__file__).resolve().parent
PACKAGES = ("src/lowtide/engine", "src/lowtide/trace")
HELPERS = "src/lowtide/_native_helpers.h"


def compile_in_place() -> list[Path]:
    """Compile ``_native*.c`` of each package and put the results beside them.

    Raises:
        SystemExit, Exception: whatever a missing or failing compiler raises.
    """
    return [_compile(package) for package in PACKAGES]


def _compile(package: str) -> Path:
    sources = sorted(map(str, (ROOT / package).glob("_native*.c")))
    headers = [str(ROOT / package / "_native.h"), str(ROOT / HELPERS)]
    distribution = Distribution({"ext_modules": [Extension("_native", sources, depends=headers)]})
    command: Any = distribution.get_command_obj("build_ext")
    command.ensure_finalized()
    command.build_temp = str(ROOT / "build" / "native")
    command.build_lib = str(ROOT / package)
    command.run()
    return Path(command.get_ext_fullpath("_native"))


def can_compile() -> bool:
    """Whether this Python is one that the file was written for: CPython with its global lock."""
    return sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")


def add_to_wheel(build_data: dict[str, Any], warn: Callable[[str], object]) -> None:
    """Add what was compiled to a wheel, which is then one for this platform; where that fails, say so and leave the wheel as it is.

    Args:
        build_data: what hatchling is told of the wheel.
        warn: is told what went wrong.
    """
    if not can_compile():
        return
    try:
        made = compile_in_place()
    except (Exception, SystemExit) as error:
        warn(f"lowtide's inner loops were not compiled, so they run in Python, which takes longer: {error}")
        return
    build_data["artifacts"] += [path.relative_to(ROOT).as_posix() for path in made]
    build_data["pure_python"], build_data["infer_tag"] = False, True


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # called by hand
    pass
else:

    class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """Called by hatchling before it puts a wheel together, also one for an editable install."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Add what was compiled."""
            if self.target_name == "wheel":
                add_to_wheel(build_data, self.app.display_warning)


if __name__ == "__main__":
    print(*compile_in_place(), sep="\n")
