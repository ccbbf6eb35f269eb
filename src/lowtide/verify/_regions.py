"""Which regions are compared with the plain step: those of a plan or policy, those that the step has already, or one for each block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn

from lowtide.engine import Observer, install, observed
from lowtide.plan import Plan
from lowtide.policy import FromTrace, Policy, apply, blocks, parse_policy
from lowtide.records import Decision
from lowtide.torch_compat._torch_regions import torch_regions_seen
from lowtide.trace import TrainingState, trace
from lowtide.verify._runs import Context

_TIME_LIMIT_S = 30.0

Asked = Plan | Policy | str | Callable[..., Decision] | None
"""What is to be replayed: what ``lowtide.apply`` takes."""


class RegionNames(Observer):
    """Names of the regions that run, in order.

    Attributes:
        names: of lowtide's.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def entering(self, region: Any, profile: Any) -> None:
        """Note it."""
        self.names.setdefault(region.name)


@contextmanager
def regions_noted(model: nn.Module) -> Iterator[list[str]]:
    """The names of the regions, of any library, that run in this context; there when it is over."""
    noted, found = RegionNames(), list[str]()
    with observed(noted), torch_regions_seen() as seen:
        yield found
    name_of = names_for(model)
    found += dict.fromkeys([*noted.names, *(name_of(region.function) for region in seen if region.recorded)])


def has_regions(model: nn.Module, step: Callable[[], object], state: TrainingState) -> bool:
    """Whether a step checkpoints anything by itself."""
    try:
        with regions_noted(model) as found:
            step()
    finally:
        state.restore()
    return bool(found)


def chosen(model: nn.Module, step: Callable[[], object], state: TrainingState, asked: Asked) -> Context:
    """The context in which the step is checkpointed.

    Raises:
        InvalidInputError: there is no such policy.
        InfeasibleBudgetError: no plan fits the budget of a policy.
    """
    if asked is not None:
        return applied(model, step, asked)
    if has_regions(model, step, state):
        return nullcontext
    return functools.partial(_installed, model)


def applied(model: nn.Module, step: Callable[[], object], asked: Plan | Policy | str | Callable[..., Decision]) -> Context:
    """The context in which a plan or policy is in force."""
    return functools.partial(_applied, model, _made(model, step, asked))


def _made(model: nn.Module, step: Callable[[], object], asked: Plan | Policy | str | Callable[..., Decision]) -> Any:
    """Some policies are made from a trace first."""
    found = parse_policy(asked) if isinstance(asked, str) else asked
    return found.make(trace(model, step), _TIME_LIMIT_S) if isinstance(found, FromTrace) else found


@contextmanager
def _applied(model: nn.Module, policy: Any) -> Iterator[None]:
    handle = apply(model, policy)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _installed(model: nn.Module) -> Iterator[None]:
    with ExitStack() as stack:
        for member in parts_of(model):
            stack.callback(install([member]).remove)
        yield


def parts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that together are the whole model: its blocks, and what stands beside them."""
    found = list(_parts("", model, set(blocks(model))))
    return list({id(module): (path, module) for path, module in reversed(found)}.values())[::-1]


def _parts(path: str, module: nn.Module, inner: set[str]) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    holds_blocks = not path or any(block.startswith(f"{path}.") for block in inner)
    children = list(module.named_children())
    if children and path not in inner and (is_list or holds_blocks):
        for name, child in children:
            yield from _parts(f"{path}.{name}" if path else name, child, inner)
    else:
        yield path, module


def names_for(model: nn.Module) -> Callable[[Any], str]:
    """What to call a function that ``torch.utils.checkpoint`` is given: the path of the module that it runs, where that can be seen."""
    paths = {id(module): path for path, module in model.named_modules()}

    def name_of(function: Any) -> str:
        module = module_behind(function)
        path = None if module is None else paths.get(id(module))
        return path if path is not None else getattr(function, "__qualname__", type(function).__qualname__)

    return name_of


def module_behind(function: Any) -> nn.Module | None:
    """The module that a function runs: itself, the one that a method is bound to, or the only one in its closure."""
    if isinstance(function, functools.partial):
        return module_behind(function.func)
    if isinstance(function, nn.Module):
        return function
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        return owner
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    modules = [value for value in cells if isinstance(value, nn.Module)]
    return modules[0] if len(modules) == 1 else None


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
