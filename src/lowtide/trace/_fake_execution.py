"""Running ops under fake tensors: shapes, types and lifetimes are right, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide._torch_private import DataDependentOutputException, DynamicOutputShapeException
from lowtide.errors import StepError
from lowtide.trace._costs import Cost, Costs, Spec
from lowtide.trace._counting import Counting
from lowtide.trace._source import source_line

# What makes a tensor of Python numbers: only then does a fake one get to know its value.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)

StandIn = Callable[[torch.Tensor], torch.Tensor]


class FakeExecution:
    """Runs each op on stand-ins, and asks a cost model what the real one would cost.

    Args:
        counting: the device that the trace is about, and the one that fake tensors live on.
        stand_in: gives the fake tensor for a real one, and any fake tensor itself.
        costs: the model.
    """

    is_fake = True

    def __init__(self, counting: Counting, stand_in: StandIn, costs: Costs) -> None:
        """Nothing has run yet."""
        self._counting, self._stand_in, self._costs = counting, stand_in, costs
        self._specs: list[Spec] = []

    def __enter__(self) -> FakeExecution:
        """Nothing to start."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to stop."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op."""
        if func not in _LIFTS:
            args, kwargs = self._admitted(args), {name: self._admitted(value) for name, value in kwargs.items()}
        out = run_fake(func, args, kwargs)
        self._specs.append(self._costs.note(func, args, kwargs, out))
        return out

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
        """Sizes of the storages that the real ops returned, where they were run."""
        return [cost.returned_bytes for cost in self._all]

    def unrecorded(self) -> TorchDispatchMode:
        """A mode under which ops are run alike, and forgotten."""
        return _Unrecorded(self)

    def forget(self) -> None:
        """Start anew."""
        self._specs.clear()


class _Unrecorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, execution: FakeExecution) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._execution = execution

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._execution.run(func, args, kwargs or {})


def run_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one op on fake tensors.

    Raises:
        StepError: what it returns depends on values, which nobody knows.
    """
    try:
        return func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        where = source_line() or "backward"
        raise StepError(
            f"this step cannot be traced with fake tensors: at {where} it asks for a value that nobody computes ({func}), "
            "as .item(), float(tensor), if tensor: and results whose shape depends on data do; "
            "trace a step without it, or trace it for real"
        ) from error
