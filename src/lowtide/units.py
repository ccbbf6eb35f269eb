"""Bytes and seconds: reading what people write, writing what people read."""

from __future__ import annotations

import re
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Budget:
    """A peak that is allowed, before the step is known: exactly one of the three ways to say it.

    Attributes:
        bytes: an absolute number of bytes.
        share: a part of the traced peak, between 0 and 1.
        activation_share: what is to remain of the activations alive at the traced peak, between 0 and 1; all else
            (parameters, gradients, optimizer state, temporaries) is allowed in full.

    With none of them given, the budget is what the device has free (``auto``).
    """

    bytes: int | None = None
    share: float | None = None
    activation_share: float | None = None

    @property
    def is_auto(self) -> bool:
        """Whether the device's free memory decides."""
        return self.bytes is None and self.share is None and self.activation_share is None


_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*%\s*(of activations)?\s*", re.IGNORECASE)


def parse_budget(budget: str | int | Budget) -> Budget:
    """Read a budget.

    Args:
        budget: bytes as a number or text (``"1.5GiB"``), a share of the traced peak (``"50%"``), a share of the
            activations in it (``"50% of activations"``), or ``"auto"``: what the device has free.

    Raises:
        BudgetError: it cannot be read, or is not above zero.

    >>> parse_budget("50%").share, parse_budget("800MB").bytes, parse_budget("auto").is_auto
    (0.5, 800000000, True)
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, bool) or not isinstance(budget, (str, int)):
        found = f"{budget!r} ({type(budget).__name__})"
        raise BudgetError(f"a budget is a number of bytes or text such as '1.5GiB', '50%' or 'auto'; found {found}")
    if isinstance(budget, int):
        if budget <= 0:
            raise BudgetError(f"a budget is above zero bytes; found {budget}")
        return Budget(bytes=budget)
    if budget.strip().lower() == "auto":
        return Budget()
    if match := _SHARE.fullmatch(budget):
        return _share(budget, float(match[1]) / 100, bool(match[2]))
    try:
        return Budget(bytes=parse_bytes(budget))
    except BudgetError:
        raise BudgetError(
            f"cannot read the budget {budget!r}: write bytes such as 1.5GiB or 800MB, a share of the traced peak such as 50%, or auto"
        ) from None


def _share(text: str, share: float, of_activations: bool) -> Budget:
    if not 0 < share <= 1:
        raise BudgetError(f"a share lies above 0% and at most at 100%; found {text!r}")
    return Budget(activation_share=share) if of_activations else Budget(share=share)


def parse_slowdown(slowdown: str | float) -> float:
    """Read by how much longer a step may take, as a share of its time.

    Raises:
        BudgetError: it is no share, or below zero.

    >>> parse_slowdown("5%"), parse_slowdown(0.05)
    (0.05, 0.05)
    """
    if isinstance(slowdown, str):
        match = _SHARE.fullmatch(slowdown)
        share = float(match[1]) / 100 if match and not match[2] else None
    else:
        share = None if isinstance(slowdown, bool) or not 0 <= slowdown < float("inf") else float(slowdown)
    if share is None:
        raise BudgetError(f"cannot read the slowdown {slowdown!r}: write a share of the step's time such as 5% or 0.05")
    return share
