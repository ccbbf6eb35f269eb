"""Parameters, buffers, attributes and training flags of the modules that a region runs.

A module's own dictionaries are read, never the module: they see what ``functional_call`` or a sharding framework put in
its place for the call, and do not keep the module alive.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

from lowtide.errors import InputChangedError

_versions_of = attrgetter("_version")
_training_of = itemgetter("training")
_values_of = dict.values
_MOODLESS = (
    *(nn.Linear, nn.LayerNorm, nn.Embedding, nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid),
)
_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})
_LARGEST_CONTAINER = 64
_OWN_OF_MODULES = frozenset(nn.Module().__dict__)
_NOT_SETTINGS = _OWN_OF_MODULES | {"forward"}
_NOTHING: list[Any] = []

# tensors, their versions, training flags where they matter, attributes of modules that have some of their own
Taken = tuple[list[Any], list[int], list[bool], list[Any]]
# what stood in the tables, training flags, memory behind parameters, and attributes: their dictionary, name and value
Undo = tuple[list[Any] | None, list[bool], list[Any], list[tuple[dict[str, Any], str, Any]]]


class Watch:
    """The dictionaries of a module and of all modules in it, and what audits learned of them.

    Attributes:
        names: paths of parameters and buffers, below the module.
        modules: paths of the modules whose training flag matters; the root is the empty one.
        audited: whether a call of it was watched op by op.
        trainings: the training flags of the calls that were.
        trainable: which tensors required gradients when it was watched last.
        written: places in ``names`` of tensors that calls write to: a replay is given copies.
        containers: attributes that are lists and the like: a replay gets copies of them as they were.
        changed: attributes that calls change: the dictionary they are in, and their name.
        states: random generators and the like, among attributes, that calls advance.
    """

    __slots__ = (
        "_children", "_dicts", "_families", "_hooked", "_moody", "_named", "_own", "_paths", "_places", "_readers", "_sharded",
        "_sizes", "_tables", "audited", "changed", "containers", "modules", "names", "states", "trainable", "trainings",
        "written",
    )  # fmt: skip

    def __init__(self, root: nn.Module) -> None:
        found = [(path, m) for path, m in root.named_modules() if type(m.__dict__.get("_parameters")) is dict]
        self._paths = [path for path, _ in found]
        self._dicts: list[dict[str, Any]] = [m.__dict__ for _, m in found]
        self._own = [m.__dict__ for _, m in found if type(m) not in _MOODLESS]
        tables = [(path, m.__dict__[kind]) for path, m in found for kind in ("_parameters", "_buffers") if m.__dict__[kind]]
        self._tables: list[dict[str, torch.Tensor | None]] = [table for _, table in tables]
        moody = [(path, m.__dict__) for path, m in found if type(m) not in _MOODLESS]
        self._moody = [own for _, own in moody]
        self.modules = [path for path, _ in moody]
        self.names = [f"{path}.{name}" if path else name for path, table in tables for name in table]
        self._sharded = any(base.__name__ in _SHARDED for _, m in found for base in type(m).__mro__)
        self._hooked = any(m._forward_hooks or m._forward_pre_hooks for _, m in found)
        self.containers = [(own, name) for own in self._own for name, value in own.items() if _is_own_container(name, value)]
        self._families: list[dict[str, Any]] = [m._modules for _, m in found if m._modules]
        self._children = [id(child) for family in self._families for child in family.values()]
        self._sizes: list[int] = []
        self._named: list[tuple[dict[str, Any], str]] = []
        self._readers: list[tuple[Any, dict[str, Any]]] = []
        self._places = [(table, name) for _, table in tables for name in table]
        self.audited = False
        self.trainings: list[list[bool]] = []
        self.trainable: list[bool] = []
        self.written: list[int] = []
        self.changed: list[tuple[dict[str, Any], str]] = []
        self.states: list[object] = []

    def is_stale(self) -> bool:
        """Whether there are other modules in it than there were."""
        now = [*chain.from_iterable(map(_values_of, self._families))]
        return len(now) != len(self._children) or [*map(id, now)] != self._children

    def tensors(self) -> list[Any]:
        """Parameters and buffers, in the order of ``names``."""
        return [*chain.from_iterable(map(_values_of, self._tables))]

    def take(self) -> Taken:
        """Read what is there now: a few hundredths of a microsecond for each tensor and module."""
        tensors: list[Any] = [*chain.from_iterable(map(_values_of, self._tables))]
        try:
            versions = [*map(_versions_of, tensors)]
        except (AttributeError, RuntimeError):
            versions = [*map(_version, tensors)]
        for index in self.written:
            tensors[index], versions[index] = _copy(tensors[index]), 0
        return tensors, versions, [*map(_training_of, self._moody)], self._settings() if self._own else _NOTHING

    def _settings(self) -> list[Any]:
        """Attributes that are no part of ``nn.Module`` itself."""
        if self._sizes != [*map(len, self._own)]:
            self._sizes = [*map(len, self._own)]
            named = [(own, [name for name in own if name not in _NOT_SETTINGS]) for own in self._own]
            self._named = [(own, name) for own, names in named for name in names]
            self._readers = [(itemgetter(*names) if len(names) > 1 else _single(names[0]), own) for own, names in named if names]
        try:
            return [*chain.from_iterable([read(own) for read, own in self._readers])]
        except KeyError:
            self._sizes = []
            return self._settings()

    def put(self, wanted: Taken, *, attributes: bool) -> Undo | None:
        """Put the tensors, flags and attributes of another moment in place; returns those that were there, None if they are the same."""
        tensors: list[Any] = [*chain.from_iterable(map(_values_of, self._tables))]
        training = [*map(_training_of, self._moody)]
        same = self._sharded or (len(tensors) == len(wanted[0]) and all(map(is_, tensors, wanted[0])))
        moved = self.rebound(wanted) if attributes and self._own and not self._sharded else []
        if same and training == wanted[2] and not self._hooked and not moved:
            return None
        data = [t.detach() for t in tensors if t is not None and t.is_leaf] if self._hooked else []
        if not same:
            self._put_tensors(wanted[0], tensors, self.written)
        undo = [(own, name, own[name]) for own, name, _ in moved]
        for own, name, value in moved:
            own[name] = value
        for own, flag in zip(self._moody, wanted[2], strict=True):
            own["training"] = flag
        return None if same and not data else tensors, training, data, undo

    def put_back(self, before: Undo | None) -> None:
        """Undo ``put``."""
        if before is None:
            return
        tensors, training, data, attributes = before
        if tensors is not None and not self._sharded:
            self._put_tensors(tensors, None, ())
            _put_data([t for t in tensors if t is not None and t.is_leaf], data)
        for own, name, value in attributes:
            own[name] = value
        for own, flag in zip(self._moody, training, strict=True):
            own["training"] = flag

    def _put_tensors(self, wanted: list[Any], there: list[Any] | None, copied: Sequence[int]) -> None:
        """Put tensors in place where others are; those at the places ``copied`` as copies."""
        if len(self._places) != len(wanted) or (there is not None and len(there) != len(wanted)):
            self._places = [(table, name) for table in self._tables for name in table]
        if len(self._places) != len(wanted):
            raise InputChangedError(
                f"a replay needs the parameters and buffers that the forward had: it had {len(wanted)}, now there are {len(self._places)}; "
                "do not add or remove any between forward and backward"
            )
        for index, (table, name) in enumerate(self._places):
            tensor = wanted[index]
            if table[name] is not tensor:
                table[name] = _copy(tensor) if index in copied else tensor

    def name_changed(self, then: Taken) -> tuple[str, torch.Tensor, int] | None:
        """The first tensor that was modified since: its path, itself and the version that it had."""
        for name, tensor, version in zip(self.names, then[0], then[1], strict=False):
            if version != -1 and _version(tensor) != version:
                return name, tensor, version
        return None

    def training_now(self) -> list[bool]:
        """The training flags, in the order of ``modules``."""
        return [*map(_training_of, self._moody)]

    def attributes(self) -> list[tuple[dict[str, Any], str]]:
        """Every attribute that is no part of ``nn.Module`` itself."""
        return [(own, name) for own in self._dicts for name in own if name not in _OWN_OF_MODULES and name != "forward"]

    def rebound(self, then: Taken) -> list[tuple[dict[str, Any], str, Any]]:
        """Attributes of modules which are another object than they were, with what they were."""
        if not self._own:
            return []
        now = self._settings()
        if len(now) != len(then[3]) or all(map(is_, now, then[3])):
            return []
        return [(own, name, old) for (own, name), old in zip(self._named, then[3], strict=True) if own[name] is not old]

    def path_of(self, own: dict[str, Any], name: str) -> str:
        """The path of an attribute, for people."""
        path = next(path for path, known in zip(self._paths, self._dicts, strict=True) if known is own)
        return f"{path}.{name}" if path else name


def _single(name: str) -> Callable[[dict[str, Any]], tuple[Any]]:
    return lambda own: (own[name],)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_() if tensor.requires_grad else tensor.clone()


def _is_own_container(name: str, value: object) -> bool:
    return name not in _OWN_OF_MODULES and type(value) in (list, dict, set, deque) and len(value) <= _LARGEST_CONTAINER  # type: ignore[arg-type]


def _version(tensor: torch.Tensor | None) -> int:
    """Tensors of inference mode have no version; they cannot be saved for backward either."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def thaw(watch: Watch, then: Taken) -> list[torch.Tensor]:
    """Have parameters that were frozen or unfrozen since require gradients as they did; returns them, to be set back."""
    changed = []
    for tensor, flag in zip(then[0], watch.trainable, strict=False):
        if tensor is not None and tensor.is_leaf and tensor.requires_grad != flag:
            tensor.requires_grad_(flag)
            changed.append(tensor)
    return changed


def _put_data(tensors: list[torch.Tensor], data: list[torch.Tensor]) -> None:
    """Undo what hooks did to the memory behind parameters: in backward the framework has it where it wants it."""
    for tensor, before in zip(tensors, data, strict=False):
        if tensor.shape != before.shape or tensor.data_ptr() != before.data_ptr():
            tensor.data = before


def still_as(then: Taken) -> bool:
    """Whether no tensor was modified since; quick."""
    try:
        return [*map(_versions_of, then[0])] == then[1]
    except (AttributeError, RuntimeError):
        return False


_WATCHES: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()


def watch_of(root: nn.Module) -> Watch:
    """The watch of a module, made once, and again when modules in it were exchanged: what was learned is then learned again."""
    watch = _WATCHES.get(root)
    if watch is None or watch.is_stale():
        watch = _WATCHES[root] = Watch(root)
    return watch
