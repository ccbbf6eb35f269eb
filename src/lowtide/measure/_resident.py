"""The most memory a process has while something runs, as the operating system counts it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_resident_set_bytes(run: Callable[[], object]) -> int | None:
    """Run something and return the peak resident set size of the process.

    On Linux the peak is started anew before the run; where the kernel does not allow that, and on macOS, it is that of the
    process so far. ``None`` where the system does not tell.
    """
    _start_anew()
    run()
    return _from_status() or _from_usage()


def _start_anew() -> None:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return


def _from_status() -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _from_usage() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
