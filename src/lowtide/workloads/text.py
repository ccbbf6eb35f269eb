"""Real data without a download: the sources of the Python standard library that runs us.

As text they are a stream of bytes. As images they are pages: 32 lines of 32 columns, each character a pixel, letters in
the first channel, digits in the second and the other visible characters in the third, so that indentation and line
lengths are shapes. A page's class is the top-level package or module that it comes from, the ten largest being the classes.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import zipfile
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["CLASSES", "PAGE_SIDE", "corpus", "pages", "standard_library"]

PAGE_SIDE = 32
CLASSES = 10
_LEFT_OUT = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests"})


@lru_cache(maxsize=1)
def standard_library() -> dict[str, bytes]:
    """The sources of the standard library, by path below its root, in order of path.

    Files that cannot be read are left out.

    Raises:
        RuntimeError: there are no sources at all, as where a Python ships compiled files only.
    """
    sources = dict(sorted(_read_all()))
    if not sources:
        raise RuntimeError(
            "the sources of the standard library are needed as training data, "
            f"and {sysconfig.get_path('stdlib')} has none: use a Python that ships them"
        )
    return sources


def corpus(limit_bytes: int) -> torch.Tensor:
    """The standard library as one text.

    Args:
        limit_bytes: where to cut it off.

    Returns:
        ``[bytes]`` uint8.
    """
    text = b"".join(standard_library().values())[:limit_bytes]
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


def pages(limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of the ten largest packages as images, the same number of each where they have as many.

    Args:
        limit: the most pages to return, a tenth for each class, but at least one.

    Returns:
        Images ``[pages, 3, 32, 32]`` uint8 and classes ``[pages]`` int64.
    """
    images, labels = [], []
    for label, package in enumerate(_largest_packages()):
        drawn = list(islice(_pages_of(package), max(limit // CLASSES, 1)))
        images += drawn
        labels += [label] * len(drawn)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def _read_all() -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    yield from _read_folder(root) if (root / "os.py").is_file() else _read_zips()


def _read_folder(root: Path) -> Iterator[tuple[str, bytes]]:
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]  # the packages installed there may be very many
        for file in (Path(folder, name) for name in files if name.endswith(".py")):
            with suppress(OSError):
                yield file.relative_to(root).as_posix(), file.read_bytes()


def _read_zips() -> Iterator[tuple[str, bytes]]:
    """A Python whose library is an archive has it on ``sys.path`` (``python312.zip``)."""
    for entry in sys.path:
        if zipfile.is_zipfile(entry):
            with zipfile.ZipFile(entry) as archive:
                yield from ((path, archive.read(path)) for path in archive.namelist() if path.endswith(".py") and _wanted(path))


def _wanted(path: str) -> bool:
    return not _LEFT_OUT.intersection(PurePosixPath(path).parts)


def _package(path: str) -> str:
    return PurePosixPath(path).parts[0]


def _largest_packages() -> list[str]:
    sizes: Counter[str] = Counter()
    for path, text in standard_library().items():
        sizes[_package(path)] += len(text)
    return sorted(sorted(sizes), key=lambda name: -sizes[name])[:CLASSES]


def _pages_of(package: str) -> Iterator[NDArray[np.uint8]]:
    return (page for path, text in standard_library().items() if _package(path) == package for page in _draw(text))


def _draw(text: bytes) -> list[NDArray[np.uint8]]:
    """One image a full page of the text; what is beyond the right edge or after the last full page is cut off."""
    lines = [line.expandtabs(4)[:PAGE_SIDE].ljust(PAGE_SIDE) for line in text.splitlines()]
    full = len(lines) // PAGE_SIDE
    characters = np.frombuffer(b"".join(lines[: full * PAGE_SIDE]), dtype=np.uint8).reshape(full, PAGE_SIDE, PAGE_SIDE)
    return list(_channels(characters))


def _channels(characters: NDArray[np.uint8]) -> NDArray[np.uint8]:
    lower = characters | 0x20
    letter = (lower >= ord("a")) & (lower <= ord("z"))
    digit = (characters >= ord("0")) & (characters <= ord("9"))
    other = (characters > ord(" ")) & ~letter & ~digit
    return np.stack([characters * mask for mask in (letter, digit, other)], axis=1)
