"""Whether a replay used a parameter or buffer that was modified since its forward.

A function can reach modules that it does not run: the rest of the model through ``self``, the other blocks of a list. Batch norm in
those updates its statistics between forward and backward, which is no concern of the replay. So where something was modified, and only
there, the replay is watched below autograd, where every op names the memory that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import _torch_private as private
from lowtide.engine._guards._attributes import Attributes, modified_in
from lowtide.engine._guards._modules import Taken, Watch
from lowtide.engine._guards._outside import Read, written_since
from lowtide.engine._guards._unmodified import still_as
from lowtide.engine._thread import state
from lowtide.errors import InputChangedError

# what it is called, itself, and the version that it had
Modified = tuple[str, torch.Tensor, int]


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the memory that ops are given.

    Attributes:
        keys: of storages.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note((args, list(kwargs.values())))
        return func(*args, **kwargs)

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.keys.add(private.storage_key(value))
        elif isinstance(value, (list, tuple)):
            for item in value:
                self._note(item)


def checked(
    watches: Iterable[tuple[Watch, Taken]], attributes: list[Attributes], outside: list[Read], target: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[[str], None]] | None:
    """Watch a replay where something was modified.

    Args:
        watches: the modules that it may run, with what they held in forward.
        attributes: of theirs that were taken apart.
        outside: what it may read elsewhere, as it was in forward.
        target: what is run again.

    Returns:
        What to run in its place, and what to call with the region's name when it has run: that raises ``InputChangedError`` if the replay
        used what was modified. ``None`` where nothing was.
    """
    modified = [entry for watch, taken in watches if not still_as(taken) for entry in watch.changed_since(taken)]
    modified += written_since(outside) if outside else ()
    if attributes:
        changed = {(id(own), name) for watch, _ in watches for own, name in watch.changed}
        modified += [entry for own, name, stored in attributes if (id(own), name) not in changed for entry in modified_in(stored, name)]
    if not modified:
        return None
    uses = _Uses()

    def noting(*args: Any, **kwargs: Any) -> Any:
        around, state.saved = state.saved, uses.keys  # what the last op saves no op reads: the replay ends there
        try:
            with _left_alone(modified), uses:
                return target(*args, **kwargs)
        finally:
            state.saved = around

    return noting, lambda region: _raise_if_used(region, modified, uses.keys)


@contextmanager
def _left_alone(modified: list[Modified]) -> Iterator[None]:
    """What the replay writes to once more is put back: it may have been the forward that had modified it."""
    before = [(tensor, tensor._version, tensor.clone()) for _, tensor, _ in modified if not tensor.requires_grad]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, copy in before:
                if tensor._version != version:
                    tensor.copy_(copy)


def _raise_if_used(region: str, modified: list[Modified], used: set[int]) -> None:
    for name, tensor, version in modified:
        if private.storage_key(tensor) in used:
            raise InputChangedError(
                f"region {region!r} needs {name!r} (shape {tuple(tensor.shape)}) as it was in forward: "
                "one of the variables needed for gradient computation has been modified by an inplace operation "
                f"(version {version} then, {tensor._version} now); update it after backward"
            )
