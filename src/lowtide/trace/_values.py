"""What is known of the values of fake tensors: small whole numbers and flags, and all that follows from them.

Steps look at such values (is there padding, are sequences packed, which rows are labelled) to choose what to run. Token ids, masks and
positions are a millionth of what a step computes, so that they can be had for real beside it.

Storages are known rather than tensors: a view of a known one is known, and what is written to is forgotten as a whole.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide._torch_private import FakeTensor, unset_fake_temporarily
from lowtide.trace._keep import typed
from lowtide.trace._ops import OpFacts, facts_of, tensors_in

_MOST_BYTES = 8 * 2**20


class KnownValues:
    """The known storages of one fake step."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._bytes: dict[int, torch.Tensor] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}

    def learn(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Take what is on the storage of a real tensor for what is on that of a fake one, should it be small and of whole numbers."""
        storage = real.untyped_storage()
        if real.dtype.is_floating_point or real.dtype.is_complex or real.is_meta or storage.nbytes() > _MOST_BYTES:
            return
        with unset_fake_temporarily(), torch.no_grad():
            self._remember(fake, torch.empty(0, dtype=torch.uint8, device=real.device).set_(storage).to("cpu", copy=True))

    def _remember(self, fake: torch.Tensor, content: torch.Tensor) -> None:
        storage = fake.untyped_storage()
        key = storage._cdata
        self._bytes[key] = content
        self._watches[key] = weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self._bytes.pop(key, None)
        self._watches.pop(key, None)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are known: of a fake one, or a real one on the host."""
        if isinstance(tensor, FakeTensor):
            return tensor.untyped_storage()._cdata in self._bytes and not tensor.dtype.is_complex
        return type(tensor) is torch.Tensor and tensor.device.type == "cpu"

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return tensor
        content = self._bytes[tensor.untyped_storage()._cdata]
        return typed(content, tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def result_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op returns for real, where that follows from what is known; ``None`` otherwise."""
        facts = facts_of(func)
        if facts.random or facts.written or facts.collective or not all(map(self.knows, tensors_in((args, *kwargs.values())))):
            return None
        with unset_fake_temporarily(), torch.no_grad():
            return func(*self._real(args), **{name: self._real(value) for name, value in kwargs.items()})

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note what becomes known, and what no longer is, by an op that returned ``out``."""
        facts = facts_of(func)
        for written in facts.written_tensors(args, kwargs):
            self._forget(written.untyped_storage()._cdata)
        read, made = tensors_in((args, *kwargs.values())), tensors_in((out,))
        if self._may_be_known(facts, read, made):
            real = self.result_of(func, args, kwargs)
            for fake, value in zip(made, tensors_in((real,)), strict=False):
                if fake.stride() == value.stride() and fake.shape == value.shape and value.storage_offset() == fake.storage_offset():
                    self.learn(fake, value)

    def _may_be_known(self, facts: OpFacts, read: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
        if facts.random or facts.written or not made:
            return False
        new = [t for t in made if isinstance(t, FakeTensor) and t.untyped_storage()._cdata not in self._bytes]
        is_small = all(not t.dtype.is_floating_point and t.untyped_storage().nbytes() <= _MOST_BYTES for t in made)
        return bool(new) and is_small and all(map(self.knows, read))

    def _real(self, value: Any) -> Any:
        """An argument with values in the place of fake tensors, for the host."""
        if isinstance(value, torch.Tensor):
            return self._value_of(value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return type(value)(map(self._real, value)) if type(value) in (list, tuple) else value


@contextmanager
def told_to_libraries(values: KnownValues) -> Iterator[None]:
    """While in this context, transformers takes fake tensors whose values are known for real ones.

    It asks whether a tensor is fake, and if so leaves out what depends on values: the masks of attention are then made for sequences that
    nobody has packed.
    """
    library: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(library, "is_fake_tensor", None)
    if original is None:
        yield
        return
    library.is_fake_tensor = lambda x: original(x) and not values.knows(x)
    try:
        yield
    finally:
        library.is_fake_tensor = original
