"""Bytes and seconds: reading what people write, writing what people read."""

from __future__ import annotations

import re

from lowtide.errors import BudgetError

_SCALE = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a number of bytes.

    Args:
        text: a number with an optional unit: ``"1.5GiB"``, ``"800MB"``, ``"4096"``.

    Returns:
        Bytes, rounded down.

    Raises:
        BudgetError: it is no positive number of bytes in a known unit.

    >>> parse_bytes("1.5KiB"), parse_bytes("2 MB"), parse_bytes("4096")
    (1536, 2000000, 4096)
    """
    match = _BYTES.fullmatch(text)
    scale = _SCALE.get(match[2].lower()) if match else None
    count = int(float(match[1]) * scale) if match and scale else 0
    if count <= 0:
        raise BudgetError(
            f"cannot read {text!r} as a number of bytes: "
            "write a positive number with B, KB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 1.5GiB"
        )
    return count


def format_bytes(count: float) -> str:
    """Write bytes with a binary unit.

    >>> format_bytes(1536), format_bytes(12), format_bytes(-3 * 2**20)
    ('1.50 KiB', '12 B', '-3.00 MiB')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Write a duration with the unit that suits it.

    >>> format_seconds(0.25), format_seconds(0.0000021), format_seconds(75)
    ('250 ms', '2.1 µs', '75 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
