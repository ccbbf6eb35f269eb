"""The policies of ``jax.checkpoint_policies``, by their names there.

In JAX they say which values of a function under ``jax.checkpoint`` may be saved; here the functions are a model's blocks, and
what may be saved is kept.
"""

from __future__ import annotations

from lowtide.policy._match import anything, made_of, named
from lowtide.policy._policy import Policy
from lowtide.policy._preset import keep_any, preset
from lowtide.policy._rules import keep, recompute

MATRIX_PRODUCTS = made_of(
    "aten.mm", "aten.addmm", "aten._addmm_activation", "aten.mv", "aten.addmv", "aten.dot", "aten._scaled_mm", "aten._int_mm"
)
"""``dot_general`` without batch dimensions. ``F.linear`` and ``torch.matmul`` by a matrix are such: they fold the batch into rows."""

BATCHED_PRODUCTS = made_of("aten.bmm", "aten.baddbmm", "aten._grouped_mm", "aten._scaled_grouped_mm")
"""``dot_general`` with batch dimensions."""

CONVOLUTIONS = made_of("aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.mkldnn_convolution")


def everything_saveable() -> Policy:
    """Keep the result of every call, as if nothing was checkpointed.

    ``jax.checkpoint_policies.everything_saveable``.
    """
    return preset("everything_saveable", keep(anything()))


def nothing_saveable() -> Policy:
    """Recompute everything, as ``full`` does.

    ``jax.checkpoint_policies.nothing_saveable``.
    """
    return preset("nothing_saveable")


def dots_saveable() -> Policy:
    """Keep matrix products, with batch dimensions or without, and convolutions.

    ``jax.checkpoint_policies.dots_saveable``. Attention as one call is none of them: fused it is none there either, and where it is
    made of products it is kept or recomputed as a whole.
    """
    return preset("dots_saveable", keep_any(MATRIX_PRODUCTS, BATCHED_PRODUCTS, CONVOLUTIONS))


def dots_with_no_batch_dims_saveable() -> Policy:
    """Keep matrix products without batch dimensions.

    ``jax.checkpoint_policies.dots_with_no_batch_dims_saveable``. In a transformer these are the products with weights; those of queries,
    keys and values have batch dimensions and are recomputed, as are convolutions.
    """
    return preset("dots_with_no_batch_dims_saveable", keep_any(MATRIX_PRODUCTS))


def save_only_these_names(*names: str) -> Policy:
    """Keep what ``lowtide.name`` gave one of these names.

    ``jax.checkpoint_policies.save_only_these_names``.

    Args:
        *names: each has to be there; ``*`` in one stands for anything.
    """
    return preset("save_only_these_names", keep(named(*names)), names=names)


def save_any_names_but_these(*names: str) -> Policy:
    """Keep what ``lowtide.name`` gave a name, unless it is one of these.

    ``jax.checkpoint_policies.save_any_names_but_these``.
    """
    return preset("save_any_names_but_these", recompute(named(*names)), keep(named("*")), names=names)


def save_anything_except_these_names(*names: str) -> Policy:
    """Keep the result of every call, unless it has one of these names.

    ``jax.checkpoint_policies.save_anything_except_these_names``.
    """
    return preset("save_anything_except_these_names", recompute(named(*names)), keep(anything()), names=names)
