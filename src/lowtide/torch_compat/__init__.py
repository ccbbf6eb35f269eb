"""The public names of ``torch.utils.checkpoint``, on lowtide's engine.

Same names, same options, same errors. Where PyTorch is silently wrong (buffers updated twice, randomness of Python and NumPy, state
around the call that is gone by backward), this is right. What does no checkpointing itself is PyTorch's own object, so that enums
and classes of both are the same ones.

    from lowtide.torch_compat import checkpoint          # instead of torch.utils.checkpoint

    with lowtide.torch_compat.substituted():             # or: whatever library calls it
        trainer.train()
"""

from __future__ import annotations

from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointError,
    CheckpointPolicy,
    DefaultDeviceType,
    GraphExecGroup,
    SelectiveCheckpointContext,
    check_backward_validity,
    detach_variable,
    get_device_states,
    noop_context_fn,
    set_device_states,
)

from lowtide.torch_compat._api import CheckpointFunction, checkpoint, checkpoint_sequential
from lowtide.torch_compat._selective import create_selective_checkpoint_contexts
from lowtide.torch_compat._settings import set_checkpoint_debug_enabled, set_checkpoint_early_stop
from lowtide.torch_compat._substitute import substituted

__all__ = [
    "SAC_IGNORED_OPS",
    "CheckpointError",
    "CheckpointFunction",
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "check_backward_validity",
    "checkpoint",
    "checkpoint_sequential",
    "create_selective_checkpoint_contexts",
    "detach_variable",
    "get_device_states",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
    "set_device_states",
    "substituted",
]
