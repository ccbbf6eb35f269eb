"""Policies: which modules are replayed, and what is kept inside them; and installing them, or a plan, on a model."""

from __future__ import annotations

from lowtide.policy._apply import Handle, apply
from lowtide.policy._attention import attention, selective
from lowtide.policy._blocks import blocks
from lowtide.policy._cheap import cheap
from lowtide.policy._checkpoint import checkpoint, read_policy
from lowtide.policy._checkpoint_wrapper import CheckpointWrapper
from lowtide.policy._chen import sqrt
from lowtide.policy._fingerprint import fingerprint
from lowtide.policy._full import full
from lowtide.policy._jax import (
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_only_these_names,
)
from lowtide.policy._json import policy_from_json
from lowtide.policy._key_value_cache import switch_caches_off
from lowtide.policy._match import anything, inside, is_random, made_of, module, named, op, shape, size
from lowtide.policy._matchers import Matcher
from lowtide.policy._megatron import megatron_full, megatron_selective
from lowtide.policy._named import ENTRIES, FromTrace, parse_policy
from lowtide.policy._policy import Policy, PolicyRegion
from lowtide.policy._rules import both, by, first_of, keep, limit_bytes, one_in, recompute
from lowtide.policy._selection import by_layer_type, every, only, segments, skip_last
from lowtide.policy._sequential import SequentialRegions, checkpoint_sequential
from lowtide.policy._settings import deepspeed, megatron
from lowtide.policy._torchtitan import torchtitan

__all__ = [
    "ENTRIES",
    "CheckpointWrapper",
    "FromTrace",
    "Handle",
    "Matcher",
    "Policy",
    "PolicyRegion",
    "SequentialRegions",
    "anything",
    "apply",
    "attention",
    "blocks",
    "both",
    "by",
    "by_layer_type",
    "cheap",
    "checkpoint",
    "checkpoint_sequential",
    "deepspeed",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "every",
    "everything_saveable",
    "fingerprint",
    "first_of",
    "full",
    "inside",
    "is_random",
    "keep",
    "limit_bytes",
    "made_of",
    "megatron",
    "megatron_full",
    "megatron_selective",
    "module",
    "named",
    "nothing_saveable",
    "one_in",
    "only",
    "op",
    "parse_policy",
    "policy_from_json",
    "read_policy",
    "recompute",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_only_these_names",
    "segments",
    "selective",
    "shape",
    "size",
    "skip_last",
    "sqrt",
    "switch_caches_off",
    "torchtitan",
]
