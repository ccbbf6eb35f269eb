"""Presets that keep what is dear to compute: attention, and all products."""

from __future__ import annotations

from lowtide.policy._jax import BATCHED_PRODUCTS, CONVOLUTIONS, MATRIX_PRODUCTS
from lowtide.policy._match import op
from lowtide.policy._matchers import Op
from lowtide.policy._policy import Policy
from lowtide.policy._preset import keep_any, preset

ATTENTION = op(
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "torch_attn._varlen_attn",
    "flash_attn.*",
) | Op("flex_attention")
"""Fused attention: ops that save what they read and return, and not the matrix between queries and keys."""


def attention() -> Policy:
    """Keep the results of fused attention only; recompute the rest of each block.

    The time of attention grows with the square of the sequence, its result does not: in long sequences no other result saves as much
    time a byte. Attention that is not fused (on a CPU with dropout, for one) is recomputed, since backward needs its matrix; where
    none is fused, the preset has nothing to keep and says so. ``nn.MultiheadAttention`` is one call, kept as a whole.
    """
    return preset("attention", keep_any(ATTENTION))


def selective() -> Policy:
    """Keep matrix products, convolutions and fused attention; recompute the rest, which mostly waits for memory."""
    return preset("selective", keep_any(MATRIX_PRODUCTS, BATCHED_PRODUCTS, CONVOLUTIONS, ATTENTION))
