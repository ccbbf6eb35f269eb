"""Parameters, buffers, attributes and training flags of the modules that a region runs.

A module's own dictionaries are read, never the module: they see what ``functional_call`` or a sharding framework put in
its place for the call, and do not keep the module alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from lowtide.engine._guards._attributes import ABSENT, load_attributes, set_attributes
from lowtide.engine._guards._memory import held_as_taken, put_data, writable_copy
from lowtide.engine._guards._outside import CONTAINERS
from lowtide.engine._guards._reading import UNREAD, Settled, same_values, values_of, versions_of
from lowtide.engine._guards._statistics import Statistics
from lowtide.engine._guards._structure import Structure, Tables
from lowtide.errors import InputChangedError

_training_of, _values_of = itemgetter("training"), dict.values
_MOODLESS = (
    *(nn.Linear, nn.LayerNorm, nn.Embedding, nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid),
)
_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})
_LARGEST_CONTAINER = 64
_MOST_WAYS = 64
_OWN_OF_MODULES = frozenset(nn.Module().__dict__)
_NOT_SETTINGS = _OWN_OF_MODULES | {"forward"}
_NOTHING: list[Any] = []

# tensors, their versions, training flags where they matter, attributes of modules that have some of their own, hooks, and
# the tensors among the attributes, with their versions
Taken = tuple[list[Any], list[int], list[bool], list[Any], Tables, list[tuple[torch.Tensor, int, str]]]
# what stood in the tables, training flags, memory behind parameters, attributes (their dictionary, name and value), modules and hooks
Undo = tuple[list[Any] | None, list[bool], list[Any], list[tuple[dict[str, Any], str, Any]], Tables | None]


class Watch:
    """The dictionaries of a module and of all modules in it, and what audits learned of them.

    Attributes:
        names: paths of parameters and buffers, below the module.
        modules: paths of the modules whose training flag matters; the root is the empty one.
        lazy: parameters in it get their shapes only in the call that is about to come.
        audited: whether a call of it was watched op by op.
        ways: of the calls that were, see ``Call.way``.
        trainings: the training flags of the calls that were.
        written: places in ``names`` of tensors that calls write to, ascending: a replay is given copies.
        statistics: those of batch norm among the buffers.
        containers: attributes that are lists and the like: a replay gets copies of them as they were.
        changed: attributes that calls change: the dictionary they are in, and their name.
        overwritten: those to whose tensors calls write, or may: the ``id`` of the dictionary, and the name.
        states: random generators and the like, among attributes, that calls advance.
        kept: what policies decided about calls in a region of it.
    """

    __slots__ = (
        "_buffer_count", "_counts", "_dicts", "_loose", "_moody", "_named", "_paths", "_places", "_readers", "_settled", "_sharded",
        "_sizes", "_structure", "_tables", "audited", "changed", "containers", "kept", "lazy", "modules", "names", "overwritten",
        "states", "statistics", "trainings", "ways", "written",
    )  # fmt: skip

    def __init__(self, root: nn.Module) -> None:
        found = [(path, m) for path, m in root.named_modules() if type(m.__dict__.get("_parameters")) is dict]
        self._paths = [path for path, _ in found]
        self._dicts: list[dict[str, Any]] = [m.__dict__ for _, m in found]
        # Buffers first: some frameworks take parameters out of their tables meanwhile, which must not shift the places of the others.
        tables = [(path, m.__dict__[kind]) for kind in ("_buffers", "_parameters") for path, m in found if m.__dict__[kind]]
        self._tables: list[dict[str, torch.Tensor | None]] = [table for _, table in tables]
        self._counts = [*map(len, self._tables)]
        self._buffer_count = sum(len(m._buffers) for _, m in found)
        # Compiled modules have no flag of their own, but that of the module in them.
        moody = [(path, m.__dict__) for path, m in found if type(m) not in _MOODLESS and "training" in m.__dict__]
        self._moody = [own for _, own in moody]
        self.modules = [path for path, _ in moody]
        self.names = [f"{path}.{name}" if path else name for path, table in tables for name in table]
        self.statistics = Statistics([m for _, m in found], self._tables)
        self._sharded = any(base.__name__ in _SHARDED for _, m in found for base in type(m).__mro__) or any(map(_is_in_flat, self._dicts))
        self._structure = Structure([m for _, m in found], exchanged=self._sharded)
        self.containers = [(own, name) for own in self._dicts for name, value in own.items() if _is_own_container(name, value)]
        self._sizes: list[int] = []
        self._named: list[tuple[dict[str, Any], str]] = []
        self._readers: list[tuple[Any, dict[str, Any]]] = []
        self._places = self._exchangeable([(table, name) for _, table in tables for name in table])
        self.lazy = any(is_lazy(tensor) for tensor in self.tensors())
        self._loose: list[tuple[dict[str, Any], str]] = []
        self._settled: Any = None
        self.audited = False
        self.ways: set[tuple[int, ...] | None] = set()
        self.trainings: list[list[bool]] = []
        self.written: list[int] = []
        self.changed: list[tuple[dict[str, Any], str]] = []
        self.overwritten: set[tuple[int, str]] = set()
        self.states: list[object] = []
        self.kept: dict[int, dict[Any, Any]] = {}

    def is_news(self, way: tuple[int, ...] | None) -> bool:
        """Whether no watched call that could reach it went this way, and there are few enough ways for that to matter."""
        return way is not None and way not in self.ways and len(self.ways) < _MOST_WAYS

    def has_gone_so(self) -> bool:
        """Whether a call of it in the training modes of now was watched."""
        return self.audited and self.training_now() in self.trainings

    def expect_writes(self) -> None:
        """Take it that calls write to every buffer, until one is watched."""
        self.written = sorted({*self.written, *range(self._buffer_count)})

    def is_stale(self) -> bool:
        """Whether there are other modules in it than there were, or parameters that had no shape."""
        return self.lazy or self._structure.is_stale()

    @property
    def has_own(self) -> bool:
        """Whether there are modules in it that have attributes of their own."""
        return bool(self._dicts)

    @property
    def has_still_buffers(self) -> bool:
        """Whether modules in it have buffers to which calls are not known to write. Of the others each call takes a copy."""
        count = self._buffer_count
        return count > 0 and (len(self.written) < count or self.written[count - 1] >= count)

    def is_managed(self, index: int) -> bool:
        """Whether a sharding framework has the tensor where it wants it, see ``_exchangeable``."""
        return self._sharded and index >= self._buffer_count

    def tensors(self) -> list[Any]:
        """Parameters and buffers, in the order of ``names``."""
        return [*chain.from_iterable(map(_values_of, self._tables))]

    def take(self) -> Taken:
        """Read what is there now: a few hundredths of a microsecond for each tensor and module."""
        tensors = self.tensors()
        try:
            versions = versions_of(tensors)
        except RuntimeError:
            versions = [*map(version_of, tensors)]
        for index in self.written:
            tensors[index], versions[index] = writable_copy(tensors[index]), 0
        settings = self._settings() if self._dicts else _NOTHING
        loose = self._take_loose() if self._loose else _NOTHING
        return tensors, versions, [*map(_training_of, self._moody)], settings, self._structure.hooks(), loose

    def find_loose(self) -> None:
        """Look which attributes are tensors: they may be written to."""
        self._settled = None
        attributes = ((own, name, own[name]) for own, name in self.attributes())
        self._loose = [(own, name) for own, name, value in attributes if isinstance(value, torch.Tensor) and not value.is_inference()]

    def _take_loose(self) -> list[tuple[torch.Tensor, int, str]]:
        found = ((own, name, own.get(name)) for own, name in self._loose)
        return [(value, version_of(value), self.path_of(own, name)) for own, name, value in found if isinstance(value, torch.Tensor)]

    def _settings(self) -> list[Any]:
        """Attributes that are no part of ``nn.Module`` itself, and last which ones these are."""
        if self._sizes != [*map(len, self._dicts)]:
            self._sizes = [*map(len, self._dicts)]
            named = [(own, [name for name in own if name not in _NOT_SETTINGS]) for own in self._dicts]
            self._named = [(own, name) for own, names in named for name in names]
            self._readers = [(itemgetter(*names) if len(names) > 1 else _single(names[0]), own) for own, names in named if names]
        try:
            return [*chain.from_iterable([read(own) for read, own in self._readers]), self._named]
        except KeyError:
            self._sizes = []
            return self._settings()

    def take_again(self, trainings: list[bool], unread: frozenset[int] = frozenset()) -> Taken | None:
        """Read it, if it is the same modules in these training modes, and calls are not known to change anything of them but tensors.

        Args:
            trainings: the training flags.
            unread: statistics that need not be copied.
        """
        try:
            taken: Taken | None = None if self._settled is None else self._settled.read(trainings)
            if taken is None:
                taken = None if unread and self.statistics.are_other() else self._settle(trainings)
        except RuntimeError:  # a tensor of inference mode
            return None
        if taken is not None:
            for index in self.written:
                if index in unread:
                    taken[1][index] = UNREAD
                else:
                    taken[0][index], taken[1][index] = writable_copy(taken[0][index]), 0
        return taken

    def _settle(self, trainings: list[bool]) -> Taken | None:
        """Read it, and note what was read, so that as long as nothing changes that takes fewer steps."""
        if self.changed or self.states or self.containers or self._loose or self._sharded or self.lazy:
            return None
        settled = None if Settled is None else self._unsettled(trainings)
        tensors = values_of(self._tables, self._counts)
        if tensors is None or not self._structure.is_same() or self._structure.hooks():
            return None
        if self._moody and [*map(_training_of, self._moody)] != trainings:
            return None
        settings = self._settings() if self._dicts else _NOTHING
        versions = versions_of(tensors)
        self._settled = settled if settled is not None and settled.fill(tensors, settings) else None
        return tensors, versions, trainings, settings, _NOTHING, _NOTHING

    def _unsettled(self, trainings: list[bool]) -> Any:
        """The dictionaries that have to stay as they are, and the count of hooks; what is in the tables is still to be filled in."""
        dictionaries = [*self._tables, *self._dicts, *self._moody, *self._structure.tables()]
        return Settled(dictionaries, len(self._tables), RemovableHandle, trainings, _NOTHING)

    def _is_settled_as(self, then: Taken) -> bool:
        """Whether nothing of it has changed since it was settled, and it was then as at another moment; quick, and false if it may have."""
        return self._settled is not None and self._settled.has(then[0], self.written, then[2], then[3])

    def note_changed(self, own: dict[str, Any], name: str) -> None:
        """Calls change this attribute."""
        self._settled = None
        self.changed.append((own, name))

    def note_state(self, value: object) -> None:
        """Calls advance this generator, or the like."""
        self._settled = None
        self.states.append(value)

    def is_as(self, then: Taken, *, attributes: bool) -> bool:
        """Whether the same tensors, but for those that calls write to, training flags and attributes are in place as at another moment."""
        if self._is_settled_as(then):
            return True
        if not same_values(self._tables, self._counts, then[0], self.written):
            return False
        if self._moody and [*map(_training_of, self._moody)] != then[2]:
            return False
        if self.lazy or not self._structure.is_same() or self._structure.hooks():
            return False
        return not attributes or not self.rebound(then, added=True)

    def lend(self, then: Taken) -> list[tuple[dict[str, Any], str, Any]]:
        """Have copies of what calls write to in place, as it was at another moment; returns what was there, to be put back."""
        places = [self._places[index] for index in self.written]
        lent = [(table, name, table[name]) for table, name in places]
        copies = [writable_copy(then[0][index]) for index in self.written]  # first of all: memory may run out
        for (table, name), copy in zip(places, copies, strict=True):
            table[name] = copy
        return lent

    def put(self, wanted: Taken, *, attributes: bool) -> Undo | None:
        """Put the tensors, flags and attributes of another moment in place; returns those that were there, None if they are the same."""
        structure = self._structure.put(wanted[4])
        try:
            return self._put_values(wanted, structure, attributes=attributes)
        except BaseException:  # those that the replay needs are not there, or memory ran out
            if structure is not None:
                self._structure.put_back(structure)
            raise

    def _put_values(self, wanted: Taken, structure: Tables | None, *, attributes: bool) -> Undo | None:
        """As ``put``, of all but hooks and modules; what can go wrong comes first."""
        self._structure.check_names()
        tensors: list[Any] = [*chain.from_iterable(map(_values_of, self._tables))]
        training = [*map(_training_of, self._moody)]
        there, then = self._exchangeable(tensors), self._exchangeable(wanted[0])
        same = not self.written and len(there) == len(then) and all(map(is_, there, then))
        moved = self.rebound(wanted, added=True) if attributes and not self._sharded else []
        if same and training == wanted[2] and not wanted[4] and not moved and structure is None:
            return None
        data = [t.detach() for t in tensors if t is not None and t.is_leaf] if wanted[4] else []
        loaded = load_attributes(moved)
        if not same:
            self._put_tensors(then, there, held_as_taken(wanted[0], wanted[1], self.written))
        undo = set_attributes(loaded)
        for own, flag in zip(self._moody, wanted[2], strict=True):
            own["training"] = flag
        return None if same and not data else tensors, training, data, undo, structure

    def put_back(self, before: Undo | None) -> None:
        """Undo ``put``."""
        if before is None:
            return
        tensors, training, data, attributes, structure = before
        if tensors is not None:
            self._put_tensors(self._exchangeable(tensors), None, ())
        if tensors is not None and not self._sharded:
            put_data([t for t in tensors if t is not None and t.is_leaf], data)
        set_attributes(attributes)
        for own, flag in zip(self._moody, training, strict=True):
            own["training"] = flag
        if structure is not None:
            self._structure.put_back(structure)

    def _exchangeable(self, places: list[Any]) -> list[Any]:
        """Those of the tensors that a replay may exchange: parameters that a sharding framework manages stay where it has them."""
        return places[: self._buffer_count] if self._sharded else places

    def _put_tensors(self, wanted: list[Any], there: list[Any] | None, copied: Sequence[int]) -> None:
        """Put tensors in place where others are; those at the places ``copied`` as copies."""
        moved = any(name not in table for table, name in self._places)
        if moved or len(self._places) != len(wanted) or (there is not None and len(there) != len(wanted)):
            self._places = self._exchangeable([(table, name) for table in self._tables for name in table])
        if len(self._places) != len(wanted):
            raise InputChangedError(
                f"a replay needs the parameters and buffers that the forward had: it had {len(wanted)}, now there are {len(self._places)}; "
                "do not add or remove any between forward and backward"
            )
        copies = {index: writable_copy(wanted[index]) for index in copied}  # first of all: memory may run out
        for index, (table, name) in enumerate(self._places):
            tensor = copies.get(index, wanted[index])
            if table[name] is not tensor:
                table[name] = tensor

    def changed_since(self, then: Taken) -> Iterator[tuple[str, torch.Tensor, int]]:
        """The tensors that were modified since: path, itself and the version that it had."""
        for name, tensor, version in zip(self.names, then[0], then[1], strict=False):
            if version >= 0 and version_of(tensor) != version:
                yield name, tensor, version
        yield from ((name, tensor, version) for tensor, version, name in then[5] if version_of(tensor) != version)

    def learn_written(self, then: Taken) -> None:
        """From now on attributes that calls change, and that were written to since, are copied: a call may have done it."""
        written = {path for tensor, version, path in then[5] if version_of(tensor) != version}
        self.overwritten.update((id(own), name) for own, name in self.changed if self.path_of(own, name) in written)

    def dictionaries(self) -> list[dict[str, Any]]:
        """Of all modules, in which their attributes are."""
        return self._dicts

    def training_now(self) -> list[bool]:
        """The training flags, in the order of ``modules``."""
        return [*map(_training_of, self._moody)]

    def attributes(self) -> list[tuple[dict[str, Any], str]]:
        """Every attribute that is no part of ``nn.Module`` itself."""
        return [(own, name) for own in self._dicts for name in own if name not in _OWN_OF_MODULES and name != "forward"]

    def rebound(self, then: Taken, *, added: bool = False) -> list[tuple[dict[str, Any], str, Any]]:
        """Attributes of modules which are another object than they were, with what they were.

        Args:
            then: another moment.
            added: those as well that were not there, for one may hide a parameter, or an attribute of the class.
        """
        if not self._dicts or self._is_settled_as(then):
            return []
        now, named = self._settings(), then[3][-1]
        if now[-1] is named and all(map(is_, now, then[3])):
            return []
        found = [(own, name, old) for (own, name), old in zip(named, then[3], strict=False) if own.get(name, ABSENT) is not old]
        if added and now[-1] is not named:
            known = {(id(own), name) for own, name in named}
            found += [(own, name, ABSENT) for own, name in now[-1] if (id(own), name) not in known]
        return found

    def path_of(self, own: dict[str, Any], name: str) -> str:
        """The path of an attribute, for people."""
        return next(f"{path}.{name}" if path else name for path, known in zip(self._paths, self._dicts, strict=True) if known is own)

    def written_in(self, tables: set[int]) -> list[str]:
        """Tensors that calls write to, of those in the tables with these ``id``."""
        return [self.names[index] for index in self.written if id(self._places[index][0]) in tables]


def _is_in_flat(own: dict[str, Any]) -> bool:
    """Whether parameters of a module are parts of one that ``FullyShardedDataParallel`` around it has gathered for the forward."""
    return "_is_fsdp_managed_module" in own and any(type(tensor) is torch.Tensor for tensor in own["_parameters"].values())


def _single(name: str) -> Callable[[dict[str, Any]], tuple[Any]]:
    return lambda own: (own[name],)


def _is_own_container(name: str, value: object) -> bool:
    if type(value) is tuple:  # what is in it may be changed
        return any(type(part) in CONTAINERS for part in value)
    return name not in _OWN_OF_MODULES and type(value) in CONTAINERS and len(value) <= _LARGEST_CONTAINER  # type: ignore[arg-type]


def version_of(tensor: torch.Tensor | None) -> int:
    """Tensors of inference mode have no version; they cannot be saved for backward either."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


_WATCHES: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()


def watch_of(root: nn.Module) -> Watch:
    """The watch of a module, made once, and again when modules in it were exchanged: what was learned is then learned again."""
    watch = _WATCHES.get(root)
    if watch is None or watch.is_stale():
        watch = _WATCHES[root] = Watch(root)
    return watch
