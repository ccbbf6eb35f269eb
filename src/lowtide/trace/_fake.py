"""The tensors of a step exchanged for fake ones, and back.

The objects that the step knows (parameters, buffers, optimizer state, tensors in the variables around it) keep their identity, for
optimizers and closures hold them; what is exchanged is what they are. A real tensor that is met later all the same is stood in for by a
fake one on a fake storage that lives as long as the real one. Storages are stood in for, not tensors, so that views stay views.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide._torch_private import FakeTensorMode, know_value, swap_tensors
from lowtide.errors import StepError
from lowtide.trace._counting import Counting
from lowtide.trace._freeze import Freezer
from lowtide.trace._keep import blank, marked, typed
from lowtide.trace._objects import find_optimizers
from lowtide.trace._values import KnownValues

_REAL = (torch.Tensor, nn.Parameter)


class FakeWorld:
    """Stands fake tensors in for real ones.

    Args:
        counting: the device that the trace is about, and the one that fake tensors live on.
        home: the device of the model; what is there is taken to the device of the trace, what is elsewhere stays.
    """

    def __init__(self, counting: Counting, home: torch.device) -> None:
        """Nothing is exchanged yet."""
        self.mode, self.values = FakeTensorMode(), KnownValues()
        self._counting, self._home = counting, home
        self._storages: dict[int, tuple[weakref.ref[Any], torch.Tensor]] = {}

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor for a real one, and any other itself."""
        return self._fake(tensor, self._device(tensor)) if _is_real(tensor) else tensor

    def _device(self, tensor: torch.Tensor) -> torch.device:
        return self._counting.lives_on if tensor.device in (self._home, torch.device("meta")) else tensor.device

    def _fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        with self.mode, torch.no_grad():
            return _view(self._blank(tensor, device), tensor)

    def _blank(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None)), blank(tensor, device)
            self.values.learn(self._storages[key][1], tensor)
        return self._storages[key][1]

    def _fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor that lives by itself."""
        with self.mode, torch.no_grad():
            return _view(blank(tensor, self._device(tensor)), tensor)

    @contextmanager
    def exchanged(self, model: nn.Module, step: Callable[[], object]) -> Iterator[None]:
        """A context in which the tensors that ``step`` can reach are fake. Whatever happens, all is put back.

        Raises:
            StepError: the model has parameters or buffers that cannot be exchanged.
        """
        _refuse_other_types(model)
        found = _Reachable()
        found.freeze(model)
        for optimizer in find_optimizers(model):
            found.freeze(optimizer)
        found.freeze(step, stray=True)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            own = set(map(id, (*model.parameters(), *model.buffers())))
            for tensor in found.exchangeable():
                pairs.append((tensor, self._double(tensor, is_state=id(tensor) not in own)))
                swap_tensors(*pairs[-1])
                self._take_over(*pairs[-1])
            yield
        finally:
            for tensor, double in reversed(pairs):
                swap_tensors(tensor, double)
            for restore in found.restore:
                restore()

    def _double(self, tensor: torch.Tensor, *, is_state: bool) -> torch.Tensor:
        if is_state and tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
            # Counters of optimizers and the like: they stay on the host, and the step reads them.
            fake = self._fake(tensor, tensor.device)
            know_value(fake, tensor.detach().clone())
            return fake
        fake = self._fake(tensor, self._device(tensor))
        return nn.Parameter(fake, tensor.requires_grad) if type(tensor) is nn.Parameter else fake.requires_grad_(tensor.requires_grad)

    def _take_over(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Give the fake tensor the gradient and the hooks of the real one, which went away with what it was."""
        if not fake.is_leaf or not fake.requires_grad:
            return
        if real.grad is not None:
            fake.grad = self._fresh(real.grad)
        for hook in (getattr(real, "_backward_hooks", None) or {}).values():
            fake.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in (getattr(real, "_post_accumulate_grad_hooks", None) or {}).values():
            fake.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class _Reachable(Freezer):
    """What a step can reach: all is put back in place, tensors are noted instead of copied."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, torch.Tensor] = {}

    def _tensor(self, tensor: torch.Tensor, stray: bool) -> Callable[[], torch.Tensor]:
        self._tensors[id(tensor)] = tensor
        return partial(_itself, tensor)

    def exchangeable(self) -> list[torch.Tensor]:
        """The tensors to exchange: leaves of known types, without gradients, which go with their parameters."""
        gradients = {id(tensor.grad) for tensor in self._tensors.values() if tensor.is_leaf and tensor.grad is not None}
        return [t for t in self._tensors.values() if _is_real(t) and t.is_leaf and id(t) not in gradients]


def _refuse_other_types(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not _is_real(tensor):
            raise StepError(
                f"{name} cannot stand under fake tensors: plain dense tensors were required, found {type(tensor).__name__} "
                f"({tensor.layout}); trace the step for real, or build the model with plain tensors on the meta device"
            )


def _view(base: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    # Of the data, for a view could not be set to require gradients, and would have a base that lives as long.
    view = typed(base, tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return marked(view, tensor.is_conj(), tensor.is_neg()).data


def _is_real(tensor: torch.Tensor) -> bool:
    return type(tensor) in _REAL and tensor.layout == torch.strided


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
