"""The training data: it is there on every kind of Python, and it is what it says."""

from __future__ import annotations

import os
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lowtide.workloads import text


@pytest.fixture(autouse=True)
def fresh_reading() -> Iterator[None]:
    text.standard_library.cache_clear()
    yield
    text.standard_library.cache_clear()


def library(root: Path, files: dict[str, str]) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


def use(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))


def test_the_corpus_begins_as_the_first_file_of_the_library_does() -> None:
    first, content = next(iter(text.standard_library().items()))
    assert content == (Path(sysconfig.get_path("stdlib")) / first).read_bytes()
    assert bytes(text.corpus(100).tolist()) == (b"".join(text.standard_library().values()))[:100]


def test_the_corpus_is_cut_where_asked() -> None:
    assert text.corpus(1000).shape == (1000,)
    assert text.corpus(1000).dtype == torch.uint8


def test_installed_packages_and_tests_are_no_part_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, library(tmp_path, {"os.py": "1", "site-packages/torch.py": "2", "test/test_os.py": "3", "email/test.py": "4"}))
    assert list(text.standard_library()) == ["email/test.py", "os.py"]


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, library(tmp_path, {"os.py": "1", "abc.py": "2"}))
    (tmp_path / "dead.py").symlink_to(tmp_path / "nowhere.py")
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: _refuse() if self.name == "abc.py" else real(self))
    assert list(text.standard_library()) == ["os.py"]


def _refuse() -> bytes:
    raise PermissionError(os.EX_NOPERM, "not yours")


def test_a_library_in_an_archive_is_read_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "python.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("os.py", "import abc")
        file.writestr("abc.pyc", b"compiled")
    use(monkeypatch, tmp_path / "absent")
    monkeypatch.setattr(sys, "path", [*sys.path, str(archive)])
    assert text.standard_library() == {"os.py": b"import abc"}


def test_a_python_without_sources_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RuntimeError, match="use a Python that ships them"):
        text.standard_library()


def test_a_page_shows_each_character_in_its_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["a1+", "\tZ", "x" * 40] + [""] * 29
    use(monkeypatch, library(tmp_path, {"os.py": "\n".join(lines) + "\n", "abc.py": "too short for a page\n"}))
    images, labels = text.pages(10)
    assert images.shape == (1, 3, 32, 32)
    assert labels.tolist() == [0]
    page = images[0]
    assert page[:, 0, :3].tolist() == [[ord("a"), 0, 0], [0, ord("1"), 0], [0, 0, ord("+")]]
    assert page[0, 1, :5].tolist() == [0, 0, 0, 0, ord("Z")]
    assert page[0, 2].tolist() == [ord("x")] * 32
    assert int(page[:, 3:].sum()) == 0


def test_pages_are_of_ten_classes_and_no_more_than_asked() -> None:
    images, labels = text.pages(50)
    assert images.shape == (len(labels), 3, 32, 32)
    assert sorted(set(labels.tolist())) == list(range(text.CLASSES))
    assert len(labels) <= 50
