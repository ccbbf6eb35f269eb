"""Which modules are in a module, and which hooks they have, and all modules: a replay runs those that the forward ran."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lowtide import _torch_private as private
from lowtide.engine._guards._reading import same_values
from lowtide.errors import InputChangedError

Table = dict[Any, Any]
# tables with what is in them; those without anything left out
Tables = list[tuple[Table, Table]]

_NONE: Tables = []
_NOTHING: list[int] = []


class Structure:
    """The tables of modules and hooks of all modules in a module.

    Args:
        found: the modules.
        exchanged: some framework takes parameters out of their tables and puts them back.
    """

    __slots__ = ("_bare", "_children", "_families", "_hooks", "_names", "_sized", "_sizes", "_table_sizes", "_tables")

    def __init__(self, found: list[nn.Module], *, exchanged: bool = False) -> None:
        self._families = [(m._modules, dict(m._modules)) for m in found if m._modules]
        self._children = [child for family, _ in self._families for child in family.values()]
        # What is registered on a module later, a parametrization say, is in a table that was empty, or makes another larger.
        tables: list[Table] = [m._modules for m in found if not m._modules] + [m._buffers for m in found]
        tables += [] if exchanged else [m._parameters for m in found]
        self._tables = [*(table for table in tables if not table), *(family for family, _ in self._families)]
        self._sized = [table for table in tables if table]
        self._sizes = [*map(len, self._sized)]
        self._names = self._names_now()
        self._table_sizes = [*map(len, self._tables)]
        self._hooks: list[Table] = [table for m in found for table in _hooks_of(m)]
        self._bare = -1
        """How many hooks there had ever been, of any module, when these had none."""

    def is_stale(self) -> bool:
        """Whether there are other modules in it than there were, or more or fewer parameters or buffers."""
        return [*map(len, self._sized)] != self._sizes or not self.is_same()

    def is_same(self) -> bool:
        """Whether the same modules are in them, nothing is in the tables that were empty, and what is in the others has the same names."""
        return same_values(self._tables, self._table_sizes, self._children, _NOTHING) and self._names_now() == self._names

    def check_names(self) -> None:
        """Raise ``InputChangedError`` if parameters or buffers have names of each other: tensors are put back in their order."""
        if [*map(len, self._sized)] == self._sizes and self._names_now() != self._names:
            raise InputChangedError(
                "a replay needs the parameters and buffers under the names that they had in forward: do not rename or exchange any between "
                "forward and backward by deleting them and setting them under another name"
            )

    def _names_now(self) -> list[str]:
        return [*chain.from_iterable(self._sized), *chain.from_iterable([family for family, _ in self._families])]

    def tables(self) -> list[Table]:
        """The tables in which modules are, and those that were empty."""
        return self._tables

    def hooks(self) -> Tables:
        """The hooks that are there now. Where there are none, that takes no look at them."""
        made = RemovableHandle.next_id
        if made == self._bare:
            return _NONE
        found = [*((table, dict(table)) for table in self._hooks if table), *_hooks_of_all()]
        if not found:
            self._bare = made
        return found

    def put(self, hooks: Tables) -> Tables | None:
        """Put modules back that were there, and hooks of another moment; returns what is to be put back, ``None`` if they are the same."""
        moved: Tables = [(family, dict(family)) for family, then in self._families if not _is_same(family, then)]
        for family, then in self._families:
            _set(family, then)
        now = self.hooks()
        if len(now) != len(hooks) or not all(one is other and _is_same(a, b) for (one, a), (other, b) in zip(now, hooks, strict=True)):
            wanted = {id(table): content for table, content in hooks}
            for table in self._hooks:
                content = wanted.get(id(table), {})
                if not _is_same(table, content):
                    moved.append((table, dict(table)))
                    _set(table, content)
            there = {id(table): content for table, content in _hooks_of_all()}
            for table in private.HOOKS_OF_ALL_MODULES:
                if not _is_same(there.get(id(table), {}), wanted.get(id(table), {})):
                    moved.append((table, there.get(id(table), {})))
                    _set(table, wanted.get(id(table), {}))
        if moved:
            _count_hooks_anew()
        return moved or None

    @staticmethod
    def put_back(moved: Tables) -> None:
        """Undo ``put``."""
        for table, content in moved:
            _set(table, content)
        _count_hooks_anew()


def _count_hooks_anew() -> None:
    """Have all look at their hooks again: a region inside, which ran meanwhile, found others than there were before or are there now."""
    RemovableHandle.next_id += 1


def _hooks_of(module: nn.Module) -> tuple[Table, ...]:
    return (
        *(module._forward_hooks, module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        *(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
    )


def _hooks_of_all() -> Tables:
    """The hooks of all modules, but for lowtide's own, which look on while regions run."""
    own = _own()
    found = [(table, {key: hook for key, hook in table.items() if key not in own}) for table in private.HOOKS_OF_ALL_MODULES if table]
    return [(table, content) for table, content in found if content]


def _own() -> set[Any]:
    hooks = chain.from_iterable(table.items() for table in private.HOOKS_OF_ALL_MODULES[:2])
    return {key for key, hook in hooks if getattr(hook, "__module__", "").startswith("lowtide.")}


def _is_same(one: Table, other: Table) -> bool:
    return len(one) == len(other) and all(map(is_, one.values(), other.values())) and list(one) == list(other)


def _set(table: Table, content: Table) -> None:
    """Put into a table what is to be in it; lowtide's own hooks stay."""
    if not _is_same(table, content):
        own = {key: table[key] for key in _own() & table.keys()} if any(table is each for each in private.HOOKS_OF_ALL_MODULES) else {}
        table.clear()
        table.update(content)
        table.update(own)
