"""Whose code a file is, and the user's line in a stack."""

from __future__ import annotations

import functools
import os
import sysconfig
from types import FrameType

import torch

_OURS = tuple(os.path.join(path, "") for path in (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__))))
_BETWEEN = os.path.join(os.path.dirname(__file__), "_kept", "")
_AUDIT = os.path.join(os.path.dirname(__file__), "_audit.py")
_FRAME = os.path.join(os.path.dirname(__file__), "_frame.py")
_SITE_OF_REGION = 1
"""As in ``_native.h``."""
_STANDARD = os.path.join(sysconfig.get_paths()["stdlib"], "")
_SITE = os.sep + "site-packages" + os.sep


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a file belongs to torch, lowtide or the standard library. What else is installed counts as the user's."""
    if file.startswith(_OURS) or file.startswith("<frozen"):
        return True
    return file.startswith(_STANDARD) and _SITE not in file


def user_line(frame: FrameType | None) -> str:
    """``file.py:12`` of the innermost code in a stack that is the user's; empty if there is none."""
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def calling_frame(frame: FrameType) -> FrameType:
    """The innermost code in a stack but for that which finds kept calls: it may or may not be in between."""
    while frame.f_code.co_filename.startswith(_BETWEEN) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def site_of(frame: FrameType) -> int:
    """From where in the code a tensor is saved, as a number: one for all inputs of regions inside, for compiled code saves those, too."""
    code = frame.f_code
    return _SITE_OF_REGION if code.co_name == "_pack_around" and code.co_filename == _FRAME else id(code) + frame.f_lasti


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported further up in a stack, by what runs in the call that is audited."""
    while frame is not None and frame.f_code.co_filename != _AUDIT:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
