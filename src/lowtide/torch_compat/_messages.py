"""Errors of the compatibility layer: of both PyTorch's class and lowtide's, so that either is caught.

They begin with the phrases that PyTorch's documentation and tests know them by; the advice that a PyTorch release adds to
its own errors is asked of that release.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.checkpoint import CheckpointError

from lowtide._torch_private import checkpoint_advice
from lowtide.errors import ReplayMismatchError


class CompatMismatchError(CheckpointError, ReplayMismatchError):
    """A replay did not do what the forward did, or was asked for what PyTorch's checkpoint refuses."""


def fewer_tensors(forward: int, replay: int) -> CompatMismatchError:
    """The replay ended before it had saved what the forward saved."""
    return CompatMismatchError(
        "torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation: "
        f"{forward} in the forward, {replay} in the recomputation.\n{checkpoint_advice()}"
    )


def more_tensors() -> CompatMismatchError:
    """The replay, which was not to stop early, saved more than the forward."""
    return CompatMismatchError(
        "torch.utils.checkpoint: trying to save more tensors during recomputation than during the original forward pass.\n"
        + checkpoint_advice()
    )


def other_tensors(differing: Sequence[tuple[int, object, object]]) -> CompatMismatchError:
    """The replay saved tensors of another shape, type or device: position, then the forward's and the replay's."""
    lines = [f"tensor at position {i}:\nsaved metadata: {saved}\nrecomputed metadata: {found}" for i, saved, found in differing]
    return CompatMismatchError(
        "torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the forward pass.\n"
        + "\n".join(lines)
        + f"\n{checkpoint_advice()}"
    )


def unpacked_twice(*, in_group: bool) -> CompatMismatchError:
    """The same saved tensor was asked for again in one backward."""
    overlap = (
        "Performing two backward calls that overlap (that need the same saved tensor) is not allowed within one GraphExecGroup: "
        "leave the group before the second call. "
    )
    return CompatMismatchError(
        "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once. "
        f"{overlap if in_group else ''}If a custom Function reads ctx.saved_tensors, let it do so once and keep what it got."
    )


def wrote_to_input() -> CompatMismatchError:
    """The replay wrote in place to an input, as the forward had not."""
    return CompatMismatchError(
        "torch.utils.checkpoint: the recomputation wrote in place to an input of the checkpointed function, which the forward had not "
        f"done.\n{checkpoint_advice()}"
    )


def suppressed_exception() -> RuntimeError:
    """The context of the forward swallowed what the function raised."""
    return RuntimeError(
        "torch.utils.checkpoint: the forward context from context_fn suppressed an exception of the checkpointed function, "
        "so there is nothing to return: let that context pass exceptions on"
    )
