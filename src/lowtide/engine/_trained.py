"""Which tensors of modules require gradients: that decides what is saved, and somebody may freeze or unfreeze some before backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from lowtide.engine._guards._modules import Taken, Watch

if TYPE_CHECKING:
    from lowtide.engine._call import Call

Watches = list[tuple[Watch, Taken]]
Trained = tuple[tuple[bool, ...], ...]
_required = attrgetter("requires_grad")


def trained_in(watches: Watches) -> Trained:
    """Of each module, which of its tensors require gradients now."""
    return tuple([_of(taken[0]) for _, taken in watches])


@contextmanager
def trained_as_in_forward(calls: Iterable[Call]) -> Iterator[None]:
    """In here what was frozen or unfrozen since the forward is as it was there."""
    changed: list[torch.Tensor] = []
    try:
        for call in calls:
            then = call.trained if call.script is None else call.script.trained
            for (_, taken), flags in zip(call.watches, then, strict=False):
                _set_back(taken, flags, changed)
        yield
    finally:
        for tensor in changed:
            tensor.requires_grad_(not tensor.requires_grad)


def _set_back(then: Taken, flags: tuple[bool, ...], changed: list[torch.Tensor]) -> None:
    for tensor, flag in zip(then[0], flags, strict=False):
        if tensor is not None and tensor.requires_grad != flag and tensor.is_leaf:
            tensor.requires_grad_(flag)
            changed.append(tensor)


def _of(tensors: list[Any]) -> tuple[bool, ...]:
    try:
        return (*map(_required, tensors),)
    except AttributeError:  # a layer without a bias
        return tuple([tensor is not None and tensor.requires_grad for tensor in tensors])
