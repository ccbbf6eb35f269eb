"""Where a tensor that autograd saves inside a call comes from: from an argument, so that a replay has it at hand, or from within."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

INSIDE = "made inside the call"
ELSEWHERE = None
"""Kept as it is, whatever becomes of the call: a parameter, an input of the region, a result that is kept anyway."""
_PLAIN = (torch.Tensor, nn.Parameter)


class Whole(NamedTuple):
    """All of an argument, in another shape; both without gaps, as nearly always.

    Attributes:
        place: which argument.
        shape: of the view.
    """

    place: int
    shape: torch.Size

    def of(self, given: torch.Tensor) -> torch.Tensor | None:
        """The same view of what takes the argument's place; ``None`` if that lies otherwise in memory."""
        return given.detach().view(self.shape) if given.is_contiguous() else None


class View(NamedTuple):
    """A view of an argument, or of the cast of one that autocast made.

    Attributes:
        place: which argument.
        given_stride: of the argument; one with other strides has another view.
        shape, stride: of the view.
        offset: of its first element from that of the argument, or of the cast.
        dtype: of the cast; ``None`` for a view of the argument itself.
    """

    place: int
    given_stride: tuple[int, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None

    def of(self, given: torch.Tensor) -> torch.Tensor | None:
        """The same view of what takes the argument's place; ``None`` if that lies otherwise in memory."""
        if given.stride() != self.given_stride:
            return None
        root = given.detach() if self.dtype is None else given.detach().to(self.dtype)
        return root.as_strided(self.shape, self.stride, root.storage_offset() + self.offset)


class Known(NamedTuple):
    """A parameter, or a view of one, that is saved where the call before saved something else: it is not known to be kept as it is.

    Attributes:
        tensor: it, apart from its gradient.
    """

    tensor: torch.Tensor


Origin = int | Whole | View | Known | str | None


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Tensors among the arguments of a torch function, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is nn.Parameter or isinstance(value, torch.Tensor):
            found.append(value)
        elif kind is tuple or kind is list:
            found += tensors_of(value)
    return found


def origin_of(tensor: torch.Tensor, given: list[torch.Tensor], versions: list[int]) -> Origin:
    """The place of an argument, a view of one, or ``INSIDE``.

    Args:
        tensor: what autograd saves.
        given: the tensors that the call was given.
        versions: of each when the call was entered: one that was written to since is no longer what a replay will be given.
    """
    for place, argument in enumerate(given):
        if tensor is argument:
            return place if tensor._version == versions[place] else INSIDE
    base = tensor._base
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return INSIDE
    if base is not None:
        for place, argument in enumerate(given):
            if base is not argument and base is not argument._base:
                continue
            if _is_whole(tensor, argument):
                return Whole(place, tensor.shape) if argument._version == versions[place] else INSIDE
            if _is_part(tensor, argument):
                unchanged = argument._version == versions[place]
                return _view(tensor, place, argument, None, int(argument.storage_offset())) if unchanged else INSIDE
    return _cast(tensor, given, versions)


def _is_whole(tensor: torch.Tensor, argument: torch.Tensor) -> bool:
    same_size = tensor.numel() == argument.numel() and tensor.dtype is argument.dtype and type(argument) in _PLAIN
    if not same_size or tensor.storage_offset() != argument.storage_offset():
        return False
    return tensor.is_contiguous() and argument.is_contiguous() and not argument.is_conj() and not argument.is_neg()


def _is_part(tensor: torch.Tensor, argument: torch.Tensor) -> bool:
    """Whether all memory of the tensor is the argument's, and none of that is skipped by it: what takes its place has it all then."""
    if type(argument) not in _PLAIN or tensor.dtype is not argument.dtype or argument.is_conj() or argument.is_neg():
        return False
    if tensor.numel() == 0 or argument.numel() == 0:
        return False
    start, extent = tensor.storage_offset() - argument.storage_offset(), _extent(argument)
    return start >= 0 and start + _extent(tensor) <= extent and extent == argument.numel()


def _extent(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _view(tensor: torch.Tensor, place: int, argument: torch.Tensor, dtype: torch.dtype | None, start: int) -> View:
    return View(place, argument.stride(), tensor.shape, tensor.stride(), int(tensor.storage_offset()) - start, dtype)


def _cast(tensor: torch.Tensor, given: list[torch.Tensor], versions: list[int]) -> View | str:
    """Whether autograd knows it as the cast of an argument, or as a view of that. Without gradients a cast cannot be told."""
    root = tensor if tensor._base is None else tensor._base
    node: Any = root.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or root._version:
        return INSIDE
    parent, output = node.next_functions[0]
    for place, argument in enumerate(given):
        if not _leads_to(parent, output, argument) or argument._version != versions[place]:
            continue
        if type(argument) in _PLAIN and argument.shape == root.shape and argument.device == root.device:
            return _view(tensor, place, argument, root.dtype, int(root.storage_offset()))
    return INSIDE


def _leads_to(node: Any, output: int, argument: torch.Tensor) -> bool:
    if argument.grad_fn is not None:
        return argument.grad_fn is node and argument.output_nr == output
    return getattr(node, "variable", None) is argument
