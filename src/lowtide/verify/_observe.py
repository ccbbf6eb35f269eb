"""What a step leaves behind, taken down to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowtide.trace import find_optimizers, random_states


def observe(model: nn.Module, step: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Run a step and copy everything that it computed, by name, to the host.

    Gradients are taken as they are accumulated, so that a step that clears them at its end shows them too.
    Names: ``loss`` (what the step returned), ``gradient of …``, ``parameter …``, ``buffer …``,
    ``optimizer state …`` and ``random state …``.
    """
    seen: dict[str, torch.Tensor] = {}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(_copy_gradient(name, seen)) for name, p in trained]  # type: ignore[no-untyped-call]
    try:
        returned = step()
    finally:
        for hook in hooks:
            hook.remove()
    return {**_returned(returned), **seen, **_state(model)}


def _copy_gradient(name: str, seen: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def copy(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            seen[f"gradient of {name}"] = _copied(parameter.grad)

    return copy


def _returned(returned: object) -> dict[str, torch.Tensor]:
    leaves = [torch.as_tensor(leaf) for leaf in tree_leaves(returned) if isinstance(leaf, (torch.Tensor, float, int))]
    return {"loss" if len(leaves) == 1 else f"result {index}": _copied(leaf) for index, leaf in enumerate(leaves)}


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {f"parameter {name}": tensor for name, tensor in model.named_parameters()}
    state |= {f"buffer {name}": tensor for name, tensor in model.named_buffers()}
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in find_optimizers(model):
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    state[f"optimizer state {key} of {names.get(parameter, '?')}"] = value
    state |= {f"random state {index}": tensor for index, tensor in enumerate(random_states())}
    return {name: _copied(tensor) for name, tensor in state.items()}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two host tensors hold the same values to the last bit (NaNs compare by their bits)."""
    if first.shape != second.shape or first.dtype != second.dtype or first.layout != second.layout:
        return False
    if first.layout != torch.strided:
        return torch.equal(first.to_dense(), second.to_dense())
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
