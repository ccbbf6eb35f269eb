"""What the documentation shows is run: examples do what the pages say, and commands have the options they are shown with."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import typer

from lowtide.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shown_commands() -> list[str]:
    """Commands in blocks of shell, and those in running text that have arguments."""
    lines = [line.split("#")[0].strip() for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    lines += [found for page in PAGES for found in re.findall(r"`(lowtide [^`\s]+ [^`\s]+ [^`\n]+)`", page.read_text(encoding="utf-8"))]
    return sorted({line for line in lines if line.startswith("lowtide ")})


def printed_by(example: Path) -> str:
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(example), run_name="__main__")
    return output.getvalue()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(example: Path) -> None:
    printed_by(example)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_shown(example: Path) -> None:
    assert any(f'"docs/examples/{example.name}"' in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize(("example", "page"), [("four_blocks.py", "how-it-works.md"), ("by_hand.py", "regions.md")])
def test_a_worked_example_prints_what_its_page_says(example: str, page: str) -> None:
    [shown] = blocks(ROOT / "docs" / page, "console")
    assert printed_by(ROOT / "docs" / "examples" / example) == shown


def test_the_readme_shows_a_part_of_an_example_word_for_word() -> None:
    [shown] = blocks(ROOT / "README.md", "python")
    assert shown in (ROOT / "docs" / "examples" / "own_loop.py").read_text(encoding="utf-8")
    assert len([line for line in shown.splitlines() if line.strip()]) <= 10


def test_commands_are_shown() -> None:
    assert any(command.startswith("lowtide fit") for command in shown_commands())


@pytest.mark.parametrize("command", shown_commands())
def test_a_command_that_is_shown_is_understood(command: str) -> None:
    _, name, *arguments = shlex.split(command)
    typer.main.get_command(app).commands[name].make_context(name, arguments)
