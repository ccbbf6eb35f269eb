"""Steps for which a device has no room: a CPU with a limit stands in for it, and raises as CUDA's allocator does."""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowtide
from lowtide import _fit
from lowtide.errors import InfeasibleBudgetError
from lowtide.plan import smallest_budget
from lowtide.records import StepTrace

sys.path.insert(0, str(Path(__file__).parent.parent / "trace"))
from _steps import gpt, residual_net


class Device(TorchDispatchMode):
    """Has so many bytes for what a step allocates. Tensors in files (where a CPU keeps what is kept away) are not on it."""

    def __init__(self, room_bytes: int | None = None) -> None:
        super().__init__()
        self.room_bytes, self.most = room_bytes, 0
        self._failures = itertools.count()  # an iterator: anything else that the step can reach is put back by a fit
        self._alive: dict[int, int] = {}
        self._watches: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and "set_" not in str(func):
                self._enter(tensor.untyped_storage())
        return out

    def _enter(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._alive or storage.filename is not None or storage.device.type == "meta":
            return
        self._alive[key] = storage.nbytes()
        self._watches[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))
        used = sum(self._alive.values())
        self.most = max(self.most, used)
        if self.room_bytes is not None and used > self.room_bytes:
            next(self._failures)
            raise torch.OutOfMemoryError(f"the device has {self.room_bytes} bytes for this step")

    @property
    def failures(self) -> int:
        return next(copy.copy(self._failures))

    def run(self, step: Callable[[], object]) -> Callable[[], object]:
        def limited() -> object:
            self._alive.clear()
            with self:
                return step()

        return limited


def used_by(step: Callable[[], object]) -> int:
    device = Device()
    device.run(step)()
    return device.most


def wide(rows: int = 512) -> tuple[torch.nn.Module, Callable[[], object]]:
    model, x = residual_net(blocks=4, rows=rows)

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    step()
    return model, step


def test_a_step_that_does_not_fit_is_fitted_all_the_same() -> None:
    model, step = wide()
    exact = lowtide.trace(model, step)
    device = Device(int(0.7 * used_by(step)))
    limited = device.run(step)
    before = [p.detach().clone() for p in model.parameters()]
    result = lowtide.fit(model, limited, "60%", rounds=1, time_limit_s=2)
    assert device.failures == 1, "only the first step may run out of memory"
    assert not result.plain_fits
    assert result.traced_peak_bytes == lowtide.simulate(exact, None).peak_bytes == result.plain.peak_bytes
    assert result.peak_bytes <= result.budget_bytes
    assert result.verified, result.verification.summary
    assert result.verification.repeatable
    assert result.verification.gradients == len(before)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    limited()
    assert device.failures == 1, "with the plan the step fits"
    result.handle.remove()


def test_a_plan_that_runs_out_of_memory_is_replaced_by_a_leaner_one() -> None:
    model, step = wide()
    device = Device(int(0.7 * used_by(step)))
    result = lowtide.fit(model, device.run(step), "95%", rounds=1, time_limit_s=2)
    assert device.failures > 1
    assert result.verified
    assert result.peak_bytes < 0.8 * result.traced_peak_bytes
    result.handle.remove()


def test_a_step_that_can_be_run_but_not_recorded_is_recorded_with_saved_tensors_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = gpt()
    recorded: list[bool] = []
    original = _fit._fit.record_step

    def record(*args: Any, offload: bool = False) -> StepTrace:
        recorded.append(offload)
        if not offload:
            raise torch.OutOfMemoryError("copies of saved tensors do not fit")
        return original(*args, offload=True)

    monkeypatch.setattr(_fit._fit, "record_step", record)
    result = lowtide.fit(model, step, "70%", rounds=1, time_limit_s=2)
    assert recorded == [False, True]
    assert result.plain_fits
    assert result.verified
    result.handle.remove()


def test_where_nothing_fits_the_error_has_the_smallest_budget_and_nothing_is_left_changed() -> None:
    model, step = wide()
    smallest = smallest_budget(lowtide.trace(model, step)).predicted_peak_bytes
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    with pytest.raises(InfeasibleBudgetError, match="smallest budget that would fit") as caught:
        lowtide.fit(model, Device(1000).run(step), "50%", rounds=1, time_limit_s=60)
    assert caught.value.smallest_bytes == pytest.approx(smallest, rel=0.01)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(a is b for a, b in zip(gradients, (p.grad for p in model.parameters()), strict=True))


def test_an_error_of_the_step_that_is_no_lack_of_memory_passes() -> None:
    model, step = wide()

    def failing() -> None:
        step()
        raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        lowtide.fit(model, failing, "50%", rounds=1, time_limit_s=2)


@pytest.mark.parametrize("message", ["DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "not enough memory"])
def test_the_cpus_way_to_say_it_is_understood(message: str) -> None:
    from lowtide._fit._plain import is_out_of_memory

    assert is_out_of_memory(RuntimeError(message))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
