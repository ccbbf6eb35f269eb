"""What is known of an operator whatever its arguments, looked up once: names and schemas cost more than many a kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide._torch_tracing import is_composite, kernel_of

_STRIDED = torch.strided
# Those of torch.distributed, in its three spellings.
_COLLECTIVE = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
# Marks for a profiler, and questions that subclasses of tensors are asked.
_NO_WORK = frozenset({"profiler", "prim"})
# The last is that of operators that give a tensor another size or storage.
_BY_VALUE = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view})


@dataclass(frozen=True, slots=True, eq=False)
class OpFacts:
    """The facts.

    Attributes:
        func: the operator, whose identity stays its own as long as it is held here.
        call: calls it, without the function of Python by which one calls operators.
        name: operator with overload.
        written: position and name of each argument that it changes in place.
        random: it draws from a generator.
        collective: it communicates.
        recorded: it is part of the step: it does work.
        view: what it returns are views of its arguments: it allocates nothing.
        varies: what it allocates depends on more than shapes, strides and types: on values, or on what its storages have room for.
        alike: all its calls cost the same, whatever their arguments: it makes views.
    """

    func: Any
    call: Any
    name: str
    written: tuple[tuple[int, str], ...]
    random: bool
    collective: bool
    recorded: bool
    view: bool
    varies: bool
    alike: bool

    def written_tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that a call with these arguments changes."""
        return tensors_in([args[position] if position < len(args) else kwargs.get(name) for position, name in self.written])


# By identity, which is faster to look up than the operator.
_known: dict[int, OpFacts] = {}


def facts_of(func: Any) -> OpFacts:
    """The facts of an operator."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = _read(func)
    return found


def _read(func: Any) -> OpFacts:
    arguments = [(i, a) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    written = tuple((i, a.name) for i, a in arguments)
    random = torch.Tag.nondeterministic_seeded in func.tags
    # What is composed of other operators may return a view or a copy.
    view = func.is_view and not is_composite(func)
    # Results that are handed in (``out=``) are made to fit. Of operators of other libraries nothing is known.
    varies = func.namespace != "aten" or not _BY_VALUE.isdisjoint(func.tags) or any(a.kwarg_only for _, a in arguments)
    recorded, alike = func.namespace not in _NO_WORK, view and not varies
    return OpFacts(func, kernel_of(func), str(func), written, random, func.namespace in _COLLECTIVE, recorded, view, varies, alike)


def look_at(values: Iterable[Any], tensors: list[torch.Tensor], description: list[Any], _tensor: type[torch.Tensor] = torch.Tensor) -> None:
    """Gather the tensors among an operator's arguments, and what tells them all from others: of tensors shapes, strides and types."""
    for value in values:
        if isinstance(value, _tensor):
            tensors.append(value)
            # What has no strides has contents that its size does not tell: it is like nothing else.
            description += (value.dtype, value.shape, value.stride()) if value.layout is _STRIDED else (object(),)
        elif type(value) in (list, tuple):
            description.append(len(value))
            look_at(value, tensors, description)
        else:
            description += (type(value), value)  # the type, for 1, 1.0 and True are equal


def tensors_in(tree: Iterable[Any], _tensor: type[torch.Tensor] = torch.Tensor) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results: operators know no containers but lists and tuples."""
    found: list[torch.Tensor] = []
    for item in tree:
        if isinstance(item, _tensor):
            found.append(item)
        elif type(item) in (list, tuple):
            found += tensors_in(item)
    return found
