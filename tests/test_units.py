"""Reading budgets and byte counts as people write them, and refusing what cannot be read."""

from __future__ import annotations

import pytest

from lowtide.errors import BudgetError
from lowtide.units import Budget, format_bytes, format_seconds, parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("1.5GiB", 3 * 2**29), ("800MB", 800_000_000), ("1 kib", 1024), (" 2 gb ", 2 * 10**9), (".5KiB", 512), ("17", 17), ("1TiB", 2**40)],
)
def test_bytes_are_read_with_any_usual_unit(text: str, count: int) -> None:
    assert parse_bytes(text) == count
    assert parse_budget(text) == Budget(bytes=count)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "half",
        "GiB",
        "-3MB",
        "0",
        "0.0GiB",
        "1.5 GiBs",
        "1e9",
        "12 parsecs",
        "50%%",
        "%",
        "150%",
        "0%",
        "-5%",
        "nan",
        "50 percent",
        "1_000",
    ],
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(BudgetError):
        parse_budget(text)


@pytest.mark.parametrize("budget", [True, 1.5, None, 0, -1, b"1GB"])
def test_what_is_no_number_of_bytes_is_refused(budget: object) -> None:
    with pytest.raises(BudgetError, match="budget is"):
        parse_budget(budget)  # type: ignore[arg-type]


def test_shares_and_auto() -> None:
    assert parse_budget("50%") == Budget(share=0.5)
    assert parse_budget("100 %") == Budget(share=1.0)
    assert parse_budget("37.5% of activations") == Budget(activation_share=0.375)
    assert parse_budget(" AUTO ").is_auto
    assert parse_budget(4096) == Budget(bytes=4096)
    assert parse_budget(Budget(share=0.25)) == Budget(share=0.25)


def test_the_error_shows_how_to_write_one() -> None:
    with pytest.raises(BudgetError, match=r"'half'.*1\.5GiB.*50%.*auto"):
        parse_budget("half")


def test_what_is_written_reads_well() -> None:
    assert [format_bytes(count) for count in (0, 1023, 1024, 1536 * 2**20)] == ["0 B", "1023 B", "1.00 KiB", "1.50 GiB"]
    assert [format_seconds(s) for s in (0.0, 2.5e-9, 0.001, 59.94)] == ["0 ns", "2.5 ns", "1 ms", "59.9 s"]
