"""Function transforms of ``torch.func`` inside a region, as ``vmap(grad(energy))``.

They forbid saved-tensor hooks, and so would not run where those of the region are in force. Here these are left aside while the transform
runs: what autograd saves in there is not dropped, and a replay, which leaves its own aside in the same way, does not make it again.
PyTorch asks for it by a function of ``torch.autograd.graph``, in whose place another is put while a region runs that is watched, or that
was seen to contain transforms.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch_private as private

if TYPE_CHECKING:
    from lowtide.engine._call import Call

_NOTHING = nullcontext()
_theirs: Any = torch.autograd.graph.disable_saved_tensors_hooks
_lock = threading.Lock()
_users = [0]


class _Met(threading.local):
    """How many transforms ran inside regions of this thread."""

    count = 0


_met = _Met()


def transforms_met() -> int:
    """How many transforms ran inside regions of this thread so far."""
    return _met.count


@contextmanager
def transforms_allowed() -> Iterator[None]:
    """Transforms may run in here although the hooks of a region, or of a trace, are in force."""
    with _lock:
        _users[0] += 1
        torch.autograd.graph.disable_saved_tensors_hooks = _leave_aside
    try:
        yield
    finally:
        with _lock:
            _users[0] -= 1
            if not _users[0]:
                torch.autograd.graph.disable_saved_tensors_hooks = _theirs


def transforms_allowed_in(*calls: Call) -> AbstractContextManager[None]:
    """The same where one of these calls was seen to run any."""
    for call in calls:
        if call.profile.transforms:
            return transforms_allowed()
    return _NOTHING


@contextmanager
def _leave_aside(error_message: str) -> Iterator[None]:
    """In the place of ``disable_saved_tensors_hooks``: hooks of the user's own are still an error."""
    hooks = private.top_hooks()
    if hooks is None or not getattr(hooks[0], "__module__", "").startswith("lowtide."):
        with _theirs(error_message):
            yield
        return
    _met.count += 1
    before = private.hooks_forbidden_by()
    private.forbid_hooks(error_message, False)
    try:
        yield
    finally:
        if before is None:
            private.allow_hooks()
        else:
            private.forbid_hooks(before, False)
