"""A fit as a dictionary for machines: bytes and seconds unrounded, keys that stay."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from lowtide.report._figures import Losses, Subject
from lowtide.report._fitted import Fitted
from lowtide.report._regions import decided

if TYPE_CHECKING:
    from lowtide.measure import Measurement
    from lowtide.plan import Simulation
    from lowtide.verify import Verification

FORMAT = "lowtide.report"
VERSION = 1


def report_dict(fit: Fitted, subject: Subject) -> dict[str, Any]:
    """The report as plain numbers, texts, lists and dictionaries; ``json.dumps`` takes it as it is.

    Returns:
        ``format`` and ``version``; ``target``, ``device``, ``fingerprint``; ``budget_bytes``;
        ``plain`` and ``planned``, each with ``predicted_peak_bytes``, ``measured_peak_bytes``, ``predicted_step_s``,
        ``step_s``, ``spread_s``, ``replay_s``, ``steps`` and ``tokens_per_s``; ``step_ratio``; ``plain_fits``;
        ``gradients`` (``compared``, ``equal``, ``repeatable``, ``summary``); ``losses`` or null;
        ``regions``, one entry a row of the table of decisions.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": subject.name,
        "device": fit.trace.device,
        "fingerprint": fit.trace.fingerprint,
        "budget_bytes": fit.budget_bytes,
        "plain": _side(fit.plain, fit.before, subject.tokens),
        "planned": _side(fit.planned, fit.after, subject.tokens),
        "step_ratio": fit.step_ratio,
        "plain_fits": fit.plain_fits,
        "gradients": _gradients(fit.verification),
        "losses": _losses(subject.losses),
        "regions": _regions(fit),
    }


def _side(measured: Measurement, predicted: Simulation, tokens: int | None) -> dict[str, Any]:
    return {
        "predicted_peak_bytes": predicted.peak_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "predicted_step_s": predicted.step_s,
        "step_s": measured.step_s,
        "spread_s": measured.spread_s,
        "replay_s": measured.replay_s,
        "steps": measured.steps,
        "tokens_per_s": tokens / measured.step_s if tokens else None,
    }


def _gradients(found: Verification) -> dict[str, Any]:
    return {"compared": found.compared, "equal": found.equal, "repeatable": found.repeatable, "summary": found.summary}


def _losses(losses: Losses | None) -> dict[str, Any] | None:
    """JSON has no NaN and no infinity: a loss that is one becomes null."""
    if losses is None:
        return None
    plain, planned = ([loss if isfinite(loss) else None for loss in side] for side in (losses.plain, losses.planned))
    return {"plain": plain, "planned": planned, "equal": losses.equal}


def _regions(fit: Fitted) -> list[dict[str, Any]]:
    return [
        {
            "paths": list(row.paths),
            "name": row.name,
            "type": row.type,
            "decision": row.decision.value,
            "saved_bytes": row.saved_bytes,
            "freed_bytes": row.freed_bytes,
            "replay_s": row.replay_s,
        }
        for row in decided(fit.trace, fit.plan, fit.after)
    ]
