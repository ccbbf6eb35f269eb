"""How a command ends when something goes wrong: one clear sentence, and an exit status.

Bad input ends with status 2 and no traceback. An error in the user's own code is shown as theirs: its line first, then
their traceback without lowtide's frames. Only a fault of lowtide itself shows everything, with status 1.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

import typer

from lowtide.errors import LowtideError

BAD_INPUT = 2
FAULT = 1
INTERRUPTED = 130
UNREAD = 141

_LOWTIDE = str(Path(__file__).parents[1]) + os.sep
_WORKLOADS = str(Path(_LOWTIDE, "workloads")) + os.sep
_SITES = tuple({sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep})
_STDLIB = sysconfig.get_path("stdlib") + os.sep
# What lowtide calls and the user's code calls as well: an error in there says nothing about whose fault it is.
_SHARED = ("torch", "numpy", "scipy", "plotly", "rich", "typer")
# Frames of torch that only pass a call on.
_PASSING_ON = ("_call_impl", "_wrapped_call_impl")


@contextmanager
def reported() -> Iterator[None]:
    """End the command in the way that suits whatever is raised inside; only the user's code may raise ``SystemExit`` here.

    Raises:
        typer.Exit: with status 2, 130 after Ctrl-C, 141 when whoever read standard output has gone (``… | head``), or 1 for a fault of
            lowtide.
    """
    try:
        yield
        sys.stdout.flush()
    except LowtideError as error:
        status = _end(f"error: {error}", BAD_INPUT)
    except KeyboardInterrupt:
        status = _end("interrupted", INTERRUPTED)
    except BrokenPipeError as error:
        status = _end_unread() if _is_ours(error) else _end(*_explain(error))
    except SystemExit as error:
        status = _end_unread() if _is_rich_giving_up(error) else _end(_ended_by_user(error), BAD_INPUT)
    except BaseException as error:
        status = _end(*_explain(error))
    else:
        return
    raise typer.Exit(status)


def _is_rich_giving_up(error: SystemExit) -> bool:
    return isinstance(error.__context__, BrokenPipeError) and _is_ours(error)


def _ended_by_user(error: SystemExit) -> str:
    where = _location(error)
    return f"error: your code ended the program at {where} (sys.exit, status {error.code}): it must return instead"


def _end_unread() -> int:
    # What is still in the buffers has to go somewhere when Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UNREAD


def _end(message: str, status: int) -> int:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    return status


def _explain(error: BaseException) -> tuple[str, int]:
    if _is_ours(error):
        full = "".join(traceback.format_exception(error))
        return f"{full}error: this is a fault of lowtide, not of your code; please report it with the lines above", FAULT
    summary = traceback.TracebackException.from_exception(error)
    what = list(summary.format_exception_only())[-1].strip()
    _trim(summary)
    sentence = f"error: your code raised an error at {_location(error)}: {what}{_hint(error)}"
    return f"{sentence}\n\n{''.join(summary.format())}".rstrip(), BAD_INPUT


def _hint(error: BaseException) -> str:
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "; a script loaded by its path belongs to no package: give the target as package.module:function"
    return ""


def _is_ours(error: BaseException) -> bool:
    """Whether lowtide, rather than the user's code, was at work."""
    if isinstance(error, SyntaxError) and error.filename and not _is_lowtide(error.filename):
        return False
    deciding = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if not _is_neutral(frame.filename)]
    return not deciding or _is_lowtide(deciding[-1])


def _is_lowtide(file: str) -> bool:
    return file.startswith(_LOWTIDE) and not file.startswith(_WORKLOADS)


def _is_neutral(file: str) -> bool:
    in_stdlib = file.startswith(_STDLIB) and not file.startswith(_SITES)
    return in_stdlib or file.startswith(("<", *_shared_folders()))


@cache
def _shared_folders() -> tuple[str, ...]:
    specs = [find_spec(name) for name in _SHARED]
    return tuple(folder + os.sep for spec in specs if spec for folder in spec.submodule_search_locations or ())


def _location(error: BaseException) -> str:
    """File and line of the user's innermost frame; of their own files rather than of libraries they use."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not _is_neutral(frame.filename) and not _is_lowtide(frame.filename)]
    own = [frame for frame in theirs if not frame.filename.startswith(_SITES)] or theirs
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "an unknown place"


def _trim(summary: traceback.TracebackException) -> None:
    """Leave the user's frames and what they called, in a traceback and in those that it came from."""
    pending, seen = [summary], set()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        shown = (frame for frame in part.stack if not _is_hidden(frame))
        theirs: list[traceback.FrameSummary] = list(dropwhile(lambda frame: _is_neutral(frame.filename), shown))
        part.stack = traceback.StackSummary.from_list(theirs)
        pending += [other for other in (part.__cause__, part.__context__) if other is not None]


def _is_hidden(frame: traceback.FrameSummary) -> bool:
    return _is_lowtide(frame.filename) or frame.filename.startswith("<frozen importlib") or frame.name in _PASSING_ON
