"""The rule that activation checkpointing began with."""

from __future__ import annotations

from lowtide.policy._full import full
from lowtide.policy._policy import Policy
from lowtide.policy._preset import Preset
from lowtide.policy._selection import segments


def sqrt() -> Policy:
    """Replay n blocks in about √n segments of about √n blocks each; only the inputs of segments are kept.

    From Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost": what is kept between segments and what one replay needs
    then grow with √n each. Segments are of consecutive siblings, so stages of a CNN have segments of their own.
    """
    return Preset("sqrt", (), segments(None, full()))
