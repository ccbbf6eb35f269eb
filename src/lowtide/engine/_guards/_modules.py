"""Parameters, buffers and training flags of the modules that a region runs.

A module's own dictionaries are read, never the module: they see what ``functional_call`` or a sharding framework put in
its place for the call, and do not keep the module alive.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.errors import InputChangedError


class Taken(NamedTuple):
    """What a module tree held at one moment, in the order of ``Watch.names``."""

    tensors: list[torch.Tensor | None]
    versions: list[int]
    trainable: list[bool]
    training: list[bool]


class Watch:
    """The dictionaries of a module and of all modules in it.

    Attributes:
        names: paths of parameters and buffers, below the module.
        modules: paths of the modules, the root is the empty one.
    """

    __slots__ = ("_dicts", "_tables", "modules", "names")

    def __init__(self, root: nn.Module) -> None:
        found = [(path, module.__dict__) for path, module in root.named_modules() if type(module.__dict__.get("_parameters")) is dict]
        self.modules = [path for path, _ in found]
        self._dicts: list[dict[str, Any]] = [own for _, own in found]
        tables = [(path, own[kind]) for path, own in found for kind in ("_parameters", "_buffers") if own[kind]]
        self._tables: list[dict[str, torch.Tensor | None]] = [table for _, table in tables]
        self.names = [f"{path}.{name}" if path else name for path, table in tables for name in table]

    def take(self) -> Taken:
        """Read what is there now: under a tenth of a microsecond a tensor."""
        tensors = [t for table in self._tables for t in table.values()]
        try:
            versions = [-1 if t is None else t._version for t in tensors]
        except RuntimeError:
            versions = [_version(t) for t in tensors]
        trainable = [t is not None and t.requires_grad for t in tensors]
        return Taken(tensors, versions, trainable, [own["training"] for own in self._dicts])

    def put(self, wanted: Taken) -> Taken:
        """Put the tensors and flags of another moment in place; returns those that were there."""
        before = self.take()
        if len(before.tensors) != len(wanted.tensors) or any(map(_is_other, before.tensors, wanted.tensors)):
            self._put_tensors(wanted.tensors)
        if before.trainable != wanted.trainable:
            _set_trainable(wanted)
        if before.training != wanted.training:
            for own, flag in zip(self._dicts, wanted.training, strict=True):
                own["training"] = flag
        return before

    def _put_tensors(self, wanted: list[torch.Tensor | None]) -> None:
        places = [(table, name) for table in self._tables for name in table]
        if len(places) != len(wanted):
            raise InputChangedError(
                f"a replay needs the parameters and buffers that the forward had: it had {len(wanted)}, now there are {len(places)}; "
                "do not add or remove any between forward and backward"
            )
        for (table, name), tensor in zip(places, wanted, strict=True):
            table[name] = tensor


def first_changed(region: str, watch: Watch, then: Taken) -> None:
    """Raise if a tensor of the modules was modified since.

    Raises:
        InputChangedError: names the first one.
    """
    for name, tensor, version in zip(watch.names, then.tensors, then.versions, strict=False):
        if tensor is not None and version != -1 and tensor._version != version:
            raise InputChangedError(
                f"region {region!r} needs {name!r} (shape {tuple(tensor.shape)}) as it was in forward: "
                "one of the variables needed for gradient computation has been modified by an inplace operation "
                f"(version {version} then, {tensor._version} now); update it after backward"
            )


def _is_other(one: object, other: object) -> bool:
    return one is not other


def _version(tensor: torch.Tensor | None) -> int:
    """Tensors of inference mode have no version; they cannot be saved for backward either."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _set_trainable(wanted: Taken) -> None:
    for tensor, flag in zip(wanted.tensors, wanted.trainable, strict=True):
        if tensor is not None and tensor.requires_grad != flag and tensor.is_leaf:
            tensor.requires_grad_(flag)


_WATCHES: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()


def watch_of(root: nn.Module, *, anew: bool = False) -> Watch:
    """The watch of a module, made once; ``anew`` when its structure may have changed."""
    watch = None if anew else _WATCHES.get(root)
    if watch is None:
        watch = _WATCHES[root] = Watch(root)
    return watch
