"""Keeps standard output for the result: what the user's code prints meanwhile goes to standard error.

Python's ``print`` is only one way to write: child processes and C libraries write to file descriptor 1, which is
therefore turned over as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator

_OUTPUT, _ERROR = 1, 2


@contextlib.contextmanager
def output_kept_clean() -> Iterator[None]:
    """Send everything written to standard output inside to standard error."""
    _flush()
    with _descriptor_turned_over(), contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        finally:
            _flush()


def silence_output() -> None:
    """From here to the end of the process, send to standard error what the user's exit handlers and threads still print."""
    _flush()
    with contextlib.suppress(OSError):
        os.dup2(_ERROR, _OUTPUT)


@contextlib.contextmanager
def _descriptor_turned_over() -> Iterator[None]:
    try:
        kept = os.dup(_OUTPUT)
    except OSError:  # there is no standard output to keep
        yield
        return
    try:
        os.dup2(_ERROR, _OUTPUT)
        yield
    finally:
        os.dup2(kept, _OUTPUT)
        os.close(kept)


def _flush() -> None:
    """Empty every buffer in front of descriptor 1: Python's, the one Python started with, and C's."""
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)


def progress() -> Callable[[str], None]:
    """A function that prints what is being done, with the seconds since this call, to standard error.

    Lines rather than a spinner: a spinner's thread would run while steps are being timed.
    """
    started_s = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - started_s:6.1f} s  {text}", file=sys.stderr, flush=True)

    return say
