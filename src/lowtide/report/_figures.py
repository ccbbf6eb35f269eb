"""The main figures of a fit, once for every display: terminal table, page header, README.

The wording of a figure, its unit and its rounding are decided here and nowhere else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from lowtide.report._fitted import Fitted
from lowtide.units import format_bytes, format_seconds

BITWISE_EQUAL = "bitwise equal"
DIFFERENT = "DIFFERENT"
"""Stands where two things that had to be equal are not."""
DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True)
class Losses:
    """Losses of the same training steps, without and with the plan, from one initial state."""

    plain: tuple[float, ...]
    planned: tuple[float, ...]

    @property
    def equal(self) -> bool:
        """They are the same to the last bit."""
        return bool(self.plain) and _bits(self.plain) == _bits(self.planned)


@dataclass(frozen=True)
class Subject:
    """What was fitted, and what is known of it beyond the fit.

    Attributes:
        name: the target as the user wrote it.
        tokens: tokens (or samples) a step trains on; ``None`` when not told.
        losses: of a training run without and with the plan, where one was made.
    """

    name: str = "model"
    tokens: int | None = None
    losses: Losses | None = None

    @property
    def title(self) -> str:
        """The name without the folders of a path.

        >>> Subject("models/train.py:build").title, Subject("gpt").title
        ('train.py:build', 'gpt')
        """
        return self.name.replace("\\", "/").rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Figure:
    """One row: a quantity without the plan, with it, and the second over the first."""

    name: str
    plain: str
    planned: str
    change: str = ""

    @property
    def alarming(self) -> bool:
        """What had to be equal is not."""
        return self.change == DIFFERENT


def figures(fit: Fitted, subject: Subject) -> tuple[Figure, ...]:
    """The rows of the table that ends a fit."""
    return tuple(row for row in (*_peaks(fit), *_times(fit, subject.tokens), _gradients(fit), _losses(subject.losses)) if row is not None)


def headline(fit: Fitted) -> str:
    """The outcome in one sentence."""
    peak, budget = format_bytes(fit.planned.peak_bytes), format_bytes(fit.budget_bytes)
    inside = "within" if fit.planned.peak_bytes <= fit.budget_bytes else "over"
    share = fit.planned.peak_bytes / fit.plain.peak_bytes
    time = f"at {fit.step_ratio:.2f} × the step time" if fit.plain_fits else "for a step that does not fit without the plan"
    return f"A peak of {peak}, {inside} the budget of {budget}: {share:.0%} of the memory {time}."


def _bits(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"{len(values)}d", *values)


def gradient_verdict(fit: Fitted) -> str:
    """Whether gradients with the plan are those without; a step that does not repeat itself can only be as near as that."""
    if not fit.verification.equal:
        return DIFFERENT
    return BITWISE_EQUAL if fit.verification.repeatable else "within noise"


def _peaks(fit: Fitted) -> tuple[Figure, ...]:
    traced, predicted = fit.before.peak_bytes, fit.after.peak_bytes
    plain, planned = fit.plain.peak_bytes, fit.planned.peak_bytes
    return (
        Figure("budget", "", format_bytes(fit.budget_bytes), f"{fit.budget_bytes / traced:.1%} of traced"),
        Figure("peak traced", format_bytes(traced), ""),
        Figure("peak predicted", "", format_bytes(predicted), f"{predicted / traced:.1%}"),
        Figure("peak measured", format_bytes(plain) if fit.plain_fits else DOES_NOT_FIT, format_bytes(planned), f"{planned / plain:.1%}"),
        Figure("measured differs by", f"{plain / traced - 1:+.2%}" if fit.plain_fits else "", f"{planned / predicted - 1:+.2%}"),
    )


def _times(fit: Fitted, tokens: int | None) -> tuple[Figure | None, ...]:
    plain, planned = fit.plain, fit.planned
    if not fit.plain_fits:  # it ran with its saved tensors kept away, which says nothing of its time
        speed = f"{tokens / planned.step_s:,.0f}" if tokens else ""
        return (
            Figure("step time", DOES_NOT_FIT, _time(planned.step_s, planned.spread_s)),
            Figure("tokens per second", "", speed) if tokens else None,
            Figure("replayed share", "", f"{planned.replay_s / planned.step_s:.1%}"),
        )
    speed, planned_speed = (f"{tokens / side.step_s:,.0f}" if tokens else "" for side in (plain, planned))
    return (
        Figure("step time", _time(plain.step_s, plain.spread_s), _time(planned.step_s, planned.spread_s), f"{fit.step_ratio:.3f} ×"),
        Figure("tokens per second", speed, planned_speed, f"{1 / fit.step_ratio:.3f} ×") if tokens else None,
        Figure("replayed share", f"{plain.replay_s / plain.step_s:.1%}", f"{planned.replay_s / planned.step_s:.1%}"),
    )


def _time(median_s: float, spread_s: float) -> str:
    return f"{format_seconds(median_s)} ± {spread_s / 2 / median_s:.1%}"


def _gradients(fit: Fitted) -> Figure:
    return Figure("gradients", f"{fit.verification.compared} tensors", "", gradient_verdict(fit))


def _losses(losses: Losses | None) -> Figure | None:
    if losses is None:
        return None
    plain, planned = (f"{side[0]:.4f} → {side[-1]:.4f}" for side in (losses.plain, losses.planned))
    return Figure(f"losses of {len(losses.plain)} steps", plain, planned, BITWISE_EQUAL if losses.equal else DIFFERENT)
