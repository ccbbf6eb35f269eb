"""Files that a command writes: checked before the work begins, written when it is done."""

from __future__ import annotations

import os
from pathlib import Path

from lowtide.errors import InvalidInputError
from lowtide.explain import explain
from lowtide.report import Fitted, Subject, fit_page, fit_png, require_png, timeline_svg


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


def refuse_other_forms(option: str, path: Path | None, forms: tuple[str, ...] = (".html", ".png", ".svg")) -> None:
    """Refuse a report that is neither a page nor a picture; and a picture that there is nothing to draw with.

    Raises:
        InvalidInputError: the name ends in something else.
        MissingExtraError: it is a PNG and matplotlib is not installed.
    """
    if path is None:
        return
    if form_of(path) not in forms:
        raise InvalidInputError(f"{option} {path}: a report is a page or a picture: let the name end in {' or '.join(forms)}")
    if form_of(path) == ".png":
        require_png()


def form_of(path: Path) -> str:
    """The ending of a report's name, in one spelling."""
    return {".htm": ".html"}.get(path.suffix.lower(), path.suffix.lower())


def write_report(path: Path, fit: Fitted, subject: Subject) -> None:
    """Write the report as HTML, its charts as one picture where the name ends in ``.png``, or the timeline alone as ``.svg``.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    if form_of(path) == ".svg":
        write(path, timeline_svg(fit, subject))
    else:
        found = explain(fit.trace)
        write(path, fit_png(fit, subject, found) if form_of(path) == ".png" else fit_page(fit, subject, found))


def write(path: Path, report: str | bytes) -> None:
    """Write a report.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    try:
        path.write_bytes(report if isinstance(report, bytes) else report.encode())
    except OSError as error:
        raise InvalidInputError(f"cannot write the report to {path}: {error.strerror or error}") from error
