"""Running ops under fake tensors: shapes, types and lifetimes are right, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide._torch_private import DataDependentOutputException, DynamicOutputShapeException
from lowtide.errors import StepError
from lowtide.trace._costs import Cost, Costs, Spec
from lowtide.trace._counting import Counting
from lowtide.trace._ops import OpFacts, facts_of
from lowtide.trace._source import source_line
from lowtide.trace._values import KnownValues

# What makes a tensor of Python numbers: only then does a fake one get to know its value.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)

StandIn = Callable[[torch.Tensor], torch.Tensor]


class FakeExecution:
    """Runs each op on stand-ins, and asks a cost model what the real one would cost.

    Args:
        counting: the device that the trace is about, and the one that fake tensors live on.
        stand_in: gives the fake tensor for a real one, and any fake tensor itself.
        costs: the model.
        values: what is known of fake tensors.
    """

    is_fake = True

    def __init__(self, counting: Counting, stand_in: StandIn, costs: Costs, values: KnownValues) -> None:
        """Nothing has run yet."""
        self._counting, self._stand_in, self._costs, self._values = counting, stand_in, costs, values
        self._specs: list[Spec] = []
        self._by_value: set[int] = set()

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], like: Hashable) -> Any:
        """Run one op."""
        func = facts.func
        if func not in _LIFTS:
            args, kwargs = self._admitted(args), {name: self._admitted(value) for name, value in kwargs.items()}
        out = self._out_of(func, args, kwargs)
        self._values.follow(func, args, kwargs, out)
        self._specs.append(self._costs.note(func, args, kwargs, out))
        return out

    def _out_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op returns.

        Raises:
            StepError: it depends on values, which are not known.
        """
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            known = self._values.result_of(func, args, kwargs)
            if known is None:
                raise _asks_for_values(func) from error
            self._by_value.add(len(self._specs))
            return self._admitted(known)

    def _admitted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._admitted, value))
        if isinstance(value, torch.device) and value.type == self._counting.device.type:
            return self._counting.lives_on
        return value

    @cached_property
    def _all(self) -> list[Cost]:
        return self._costs.cost_of(self._specs)

    def seconds(self) -> Sequence[float]:
        """Time of every op, by the cost model."""
        return [cost.seconds for cost in self._all]

    def peaks(self) -> Sequence[int]:
        """Bytes above the start for every op, where the cost model knows them."""
        return [cost.peak_bytes for cost in self._all]

    def returned(self) -> Sequence[Sequence[int]]:
        """Sizes of the storages that the real ops returned, where they were run, and on values that do not matter."""
        return [() if op in self._by_value else cost.returned_bytes for op, cost in enumerate(self._all)]

    def unrecorded(self) -> TorchDispatchMode:
        """A mode under which ops are run alike, and forgotten."""
        return _Unrecorded(self)

    def forget(self) -> None:
        """Start anew."""
        self._specs.clear()
        self._by_value.clear()


class _Unrecorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, execution: FakeExecution) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._execution = execution

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._execution.run(facts_of(func), args, kwargs or {}, None)


def _asks_for_values(func: Any) -> StepError:
    where = source_line() or "backward"
    return StepError(
        f"this step cannot be traced with fake tensors: at {where} it asks for a value that nobody computes ({func}), "
        "as .item(), float(tensor), if tensor: and results whose shape depends on data do; "
        "trace a step without it, or trace it for real"
    )
