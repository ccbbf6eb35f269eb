"""Selective checkpointing by ops, as torchtitan does it."""

from __future__ import annotations

from lowtide.policy._attention import ATTENTION
from lowtide.policy._match import inside, made_of
from lowtide.policy._policy import Policy
from lowtide.policy._preset import keep_any, preset
from lowtide.policy._rules import NONE, Rule, one_in, recompute
from lowtide.records import Decision

PRODUCTS = made_of("aten.mm", "aten.addmm", "aten._scaled_mm")
"""torchtitan counts ``aten.mm`` alone, since its models have no biases; a linear layer with one runs ``aten.addmm``."""

_GATE = "**.moe.router.gate"


def torchtitan(*force_recompute: str) -> Policy:
    """Keep attention and every second matrix product of each block; recompute the rest.

    After ``torchtitan/distributed/activation_checkpoint.py`` with ``mode = "selective"`` and ``selective_ac_option = "op"``: the compute
    and communication ops on its list are saved, except every second ``mm``: the first is kept, the second recomputed, and so on through
    the block. Products of modules in ``per_op_sac_force_recompute_mm_shapes_by_fqns`` are recomputed and not counted; torchtitan goes
    by the shapes of their weights, here it is the modules themselves.

    Args:
        *force_recompute: paths of modules whose products are recomputed and not counted; if none are given, ``**.moe.router.gate``
            where there is one, as there.
    """
    forced = (
        recompute(inside(*force_recompute) & PRODUCTS) if force_recompute else Rule(Decision.RECOMPUTE, (inside(_GATE) & PRODUCTS,), NONE)
    )
    arguments = {"force_recompute": force_recompute} if force_recompute else {}
    attention = Rule(Decision.KEEP, (ATTENTION,), NONE)
    return preset("torchtitan", forced, one_in(2, keep_any(PRODUCTS)), attention, **arguments)
