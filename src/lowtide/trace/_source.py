"""Which line of the user's code is running."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from types import FrameType

import torch

_TORCH, _LOWTIDE = (os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
_TYPED = ("<stdin>", "<ipython-input-")
"""What is typed at a prompt."""
_WORKLOADS = os.path.join(_LOWTIDE, "workloads", "")


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a file is neither of torch nor of lowtide."""
    if filename.startswith(_TYPED):
        return True
    if filename.startswith((_TORCH, "<")) or "contextlib" in filename:
        return False
    # The bundled workloads stand for the user's own code.
    return filename.startswith(_WORKLOADS) or not filename.startswith(_LOWTIDE)


def source_line() -> str:
    """The innermost running line outside torch and lowtide, as ``file.py:12``; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_users(filename):
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
