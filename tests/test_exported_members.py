"""The public surface is sorted, documented, and exactly what the reference shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lowtide
import lowtide.errors

DOCS = Path(__file__).parent.parent / "docs"
ERRORS = sorted(name for name in vars(lowtide.errors) if name.endswith("Error"))


def shown_in_the_reference() -> set[str]:
    """The names of all ``:::`` blocks; the errors module stands for its classes."""
    blocks = re.findall(r"^::: lowtide\.(?:\w+\.)*(\w+)$", (DOCS / "reference.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(blocks) == len(set(blocks))
    return {*blocks, *ERRORS} - {"errors"}


def test_the_surface_is_sorted_and_has_no_name_twice() -> None:
    assert lowtide.__all__ == sorted(set(lowtide.__all__))


def test_the_surface_is_what_the_reference_shows() -> None:
    assert set(lowtide.__all__) == shown_in_the_reference()


@pytest.mark.parametrize("name", lowtide.__all__)
def test_an_exported_name_is_there_and_documented(name: str) -> None:
    assert (getattr(lowtide, name).__doc__ or "").strip()


def test_every_error_is_exported() -> None:
    assert set(ERRORS) <= set(lowtide.__all__)


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_has_its_section_in_the_documentation(name: str) -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert f"## {name}\n" in text or name in ("LowtideError", "InvalidInputError")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lowtide.nothing  # noqa: B018
