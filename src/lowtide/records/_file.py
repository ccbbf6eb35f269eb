"""Reading and writing the file of a trace, with errors that say what to do."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from lowtide.errors import TraceError


def write(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file as a whole: a reader sees the old one or the new one.

    Raises:
        TraceError: it cannot be written.
    """
    target = Path(path)
    try:
        _replace(target, text)
    except OSError as error:
        raise TraceError(f"cannot write the trace to {target}: {error.strerror or error}") from error


def read(path: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        TraceError: it cannot be read, or is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no trace: it is not text in UTF-8") from error
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from error


def _replace(target: Path, text: str) -> None:
    # In the same folder, for a rename is one step within a file system alone.
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(beside, _mode_of(target))
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _mode_of(target: Path) -> int:
    """The permissions of the file that is replaced, or those that a new one gets."""
    with contextlib.suppress(OSError):
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
