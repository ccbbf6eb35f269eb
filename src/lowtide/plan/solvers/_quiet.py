"""Keep standard output clean while HiGHS runs.

HiGHS has messages that no option switches off; they go to the C library's standard output, where commands of ours
print JSON for machines. What others print meanwhile comes out afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator

_STDOUT = 1
_HIGHS = b"Highs"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what is written to standard output, and drop the lines of HiGHS."""
    try:
        original = os.dup(_STDOUT)
    except OSError:  # closed, as in a service: nothing can be written there
        yield
        return
    with os.fdopen(original, "wb", buffering=0) as out, tempfile.TemporaryFile() as held:
        _flush()
        os.dup2(held.fileno(), _STDOUT)
        try:
            yield
        finally:
            _flush()
            os.dup2(out.fileno(), _STDOUT)
            held.seek(0)
            out.writelines(line for line in held if not line.startswith(_HIGHS))


def _flush() -> None:
    """Python's buffer, then the C library's, which is what HiGHS prints to."""
    if sys.stdout is not None:
        sys.stdout.flush()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
