"""Files that a command writes: checked before the work begins, written when it is done."""

from __future__ import annotations

import os
from pathlib import Path

from lowtide.errors import InvalidInputError
from lowtide.explain import explain
from lowtide.report import Fitted, Subject, fit_page, timeline_svg


def refuse_unwritable(option: str, path: Path | None) -> None:
    """Find out now rather than after minutes of measuring.

    Raises:
        InvalidInputError: no file can be written there.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise InvalidInputError(f"{option} {path} is a directory: name a file in it")
    if not folder.is_dir():
        raise InvalidInputError(f"{option} {path}: there is no directory {folder}; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidInputError(f"{option} {path} cannot be written: permission denied")


def refuse_other_forms(option: str, path: Path | None) -> None:
    """Refuse a report that is neither a page nor a picture.

    Raises:
        InvalidInputError: the name ends in something else.
    """
    if path is not None and path.suffix.lower() not in (".html", ".htm", ".svg"):
        raise InvalidInputError(f"{option} {path}: a report is a page or a picture of the timeline: let the name end in .html or .svg")


def write_report(path: Path, fit: Fitted, subject: Subject) -> None:
    """Write the report as HTML, or the timeline alone as a picture where the name ends in ``.svg``.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    write_text(path, timeline_svg(fit, subject) if path.suffix.lower() == ".svg" else fit_page(fit, subject, explain(fit.trace)))


def write_text(path: Path, text: str) -> None:
    """Write a report.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot write the report to {path}: {error.strerror or error}") from error
