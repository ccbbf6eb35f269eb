"""A trace under fake tensors: the same record as the real one, for devices that are not here, and nothing is touched."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.errors import InvalidInputError, StepError
from lowtide.plan import simulate
from lowtide.records import Category, Phase, StepTrace
from lowtide.trace import trace
from lowtide.trace._gpus import GPUS, gpu_named

sys.path.insert(0, str(Path(__file__).parent))
from _steps import STEPS, Made, accumulation, gpt, no_optimizer, residual_net

FAKEABLE = {name: make for name, make in STEPS.items() if name not in {"optimizer_with_closure", "sparse_gradients"}}


def peak(traced: StepTrace) -> int:
    return simulate(traced, None).peak_bytes


@pytest.fixture(params=FAKEABLE.values(), ids=FAKEABLE.keys())
def made(request: pytest.FixtureRequest) -> Made:
    return request.param()


def comparable(traced: StepTrace, name: str) -> list[object]:
    """Saved tensors; of the workspace that oneDNN's recurrent layers hand to their backward a fake tensor has no shape."""
    if name != "recurrent":
        return list(traced.saved)
    return [replace(saved, shape=(), bytes=0) if saved.dtype == "uint8" else saved for saved in traced.saved]


@pytest.mark.parametrize("name", sorted(FAKEABLE))
def test_on_the_same_device_the_record_is_that_of_the_real_step(name: str) -> None:
    model, step = FAKEABLE[name]()
    real, fake = trace(model, step), trace(model, step, fake=True)
    assert peak(fake) == pytest.approx(peak(real), rel=0.005)
    assert [(op.name, op.phase, op.source, op.call) for op in fake.ops] == [(op.name, op.phase, op.source, op.call) for op in real.ops]
    assert fake.calls == real.calls
    assert fake.storages == real.storages
    assert comparable(fake, name) == comparable(real, name)
    assert (fake.fake, real.fake) == (True, False)


def everything(model: nn.Module) -> list[object]:
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*(t.clone() for t in model.state_dict().values()), *gradients, torch.get_rng_state()]


def equal(before: list[object], after: list[object]) -> bool:
    pairs = zip(before, after, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b for a, b in pairs)


def test_everything_is_put_back_to_the_last_bit(made: Made) -> None:
    model, step = made
    step()
    before, objects = everything(model), [id(p) for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    gradients = [p.grad for p in model.parameters()]
    trace(model, step, fake=True)
    assert equal(before, everything(model))
    assert objects == [id(p) for p in model.parameters()]
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert all(a is b for a, b in zip(gradients, (p.grad for p in model.parameters()), strict=True))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_training_goes_on_as_if_nothing_had_been() -> None:
    def losses(traced: bool) -> list[float]:
        torch.manual_seed(0)
        model, step = gpt()
        found = []
        for _ in range(4):
            found.append(float(step()))  # type: ignore[arg-type]
            if traced:
                trace(model, step, fake=True)
        return found

    assert losses(traced=True) == losses(traced=False)


def test_everything_is_put_back_when_the_step_raises() -> None:
    model, x = residual_net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(fails: bool = True) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        if fails:
            raise KeyError("theirs")

    step(fails=False)
    before = everything(model)
    with pytest.raises(KeyError, match="theirs"):
        trace(model, step, fake=True)
    assert equal(before, everything(model))
    assert type(x) is torch.Tensor
    assert {type(v) for state in optimizer.state.values() for v in state.values()} == {torch.Tensor}
    step(fails=False)


def test_hooks_of_the_user_run_meanwhile_and_afterwards() -> None:
    model, x = residual_net(blocks=1)
    parameter = next(model.parameters())
    seen: list[str] = []
    parameter.register_hook(lambda gradient: seen.append("gradient"))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))

    def step() -> None:
        model(x).square().mean().backward()

    trace(model, step, fake=True)
    assert seen == ["gradient", "accumulated"] * 2
    seen.clear()
    step()
    assert seen == ["gradient", "accumulated"]


def test_nothing_of_the_steps_size_is_allocated_and_nothing_is_left() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(40)))
        x = torch.empty(65536, 8192)
    traced = trace(model, lambda: model(x).square().mean().backward(), fake=True, device="cuda", gpu="h200")
    assert peak(traced) > 80 * 2**30
    assert sum(s.bytes for s in traced.storages if s.category is Category.PARAMETER) == 40 * (8192 * 8192 * 4 + 8192 * 4)
    assert next(model.parameters()).device.type == "meta"


def test_tensors_that_the_step_finds_by_itself_are_stood_in_for() -> None:
    model, x = residual_net(blocks=1)
    hidden = weakref.WeakValueDictionary({"x": x})

    def step() -> None:
        found = hidden["x"]
        model(found).square().mean().backward()

    real, fake = trace(model, step), trace(model, step, fake=True)
    assert peak(fake) == peak(real)
    assert torch.isfinite(x).all()


def on_cuda(make: Callable[[], Made], gpu: str = "a100-80gb") -> StepTrace:
    return trace(*make(), fake=True, device="cuda", gpu=gpu)


def test_bytes_are_rounded_as_the_caching_allocator_does() -> None:
    traced = on_cuda(no_optimizer)
    assert traced.device == "cuda:0"
    assert traced.timing == "a100-80gb"
    assert all(storage.bytes % 512 == 0 for storage in traced.storages)
    exact = trace(*no_optimizer(), fake=True)
    assert [s.bytes for s in traced.storages] == [-(-s.bytes // 512) * 512 for s in exact.storages]


def test_a_gpu_alone_means_cuda() -> None:
    assert trace(*no_optimizer(), fake=True, gpu="l4").device == "cuda:0"


def test_optimizers_work_on_all_parameters_at_once_as_on_cuda() -> None:
    names = [op.name for op in on_cuda(accumulation).ops if op.phase is Phase.OPTIMIZER]
    assert "aten._foreach_addcdiv_.ScalarList" in names
    model, step = accumulation()
    trace(model, step, fake=True, device="cuda")
    assert any("_foreach" in op.name for op in trace(model, step).ops) is False


def test_times_follow_the_data_sheet() -> None:
    def seconds(gpu: str, width: int, dtype: torch.dtype) -> float:
        model = nn.Linear(width, width, dtype=dtype)
        x = torch.empty(4096, width, dtype=dtype)
        traced = trace(model, lambda: model(x).sum().backward(), fake=True, gpu=gpu)
        return next(op.seconds for op in traced.ops if op.name == "aten.addmm.default")

    bound_by_arithmetic = seconds("h100", 4096, torch.bfloat16)
    assert bound_by_arithmetic == pytest.approx(2 * 4096**3 / 989e12 / 0.7)
    assert seconds("h100", 4096, torch.float32) > 10 * bound_by_arithmetic
    assert seconds("h200", 4096, torch.bfloat16) == bound_by_arithmetic
    moved = 2 * (2 * 4096 * 64 + 64 * 64 + 64)
    assert seconds("l4", 64, torch.bfloat16) == pytest.approx(moved / 300e9 / 0.8)


def test_views_take_no_time_on_a_gpu() -> None:
    traced = on_cuda(gpt)
    assert {op.seconds for op in traced.ops if op.name in ("aten.view.default", "aten.t.default", "aten.transpose.int")} == {0.0}
    assert all(op.seconds >= 2e-6 for op in traced.ops if op.name == "aten.addmm.default")


def test_times_on_the_cpu_are_measured() -> None:
    model, step = no_optimizer()
    real, fake = (sum(op.seconds for op in t.ops) for t in (trace(model, step), trace(model, step, fake=True)))
    assert real / 20 < fake < real * 20


@pytest.mark.parametrize(
    "asks",
    [
        lambda loss: loss.item(),
        lambda loss: bool(loss),  # noqa: PLW0108 - the line is what is looked for
        lambda loss: 1 if loss > 0 else 2,
        lambda loss: torch.nonzero(loss.expand(3)),
        lambda loss: loss.expand(3)[loss.expand(3) > 0],
    ],
    ids=["item", "bool", "if", "nonzero", "mask"],
)
def test_a_step_that_asks_for_values_is_refused_with_its_line(asks: Callable[[torch.Tensor], object]) -> None:
    model = nn.Linear(2, 2)

    def step() -> None:
        loss = model(torch.ones(1, 2)).sum()
        asks(loss)
        loss.backward()

    before = model.weight.clone()
    with pytest.raises(StepError, match=rf"at {__file__}:{asks.__code__.co_firstlineno} it asks for a value"):
        trace(model, step, fake=True)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "add fake=True"),
        ({"gpu": "h100"}, "add fake=True"),
        ({"fake": True, "gpu": "abacus"}, "there are a10, a100-40gb"),
        ({"fake": True, "device": "cpu", "gpu": "h100"}, "give device='cuda'"),
        ({"fake": True, "device": "xpu"}, "'cpu' or 'cuda'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        trace(*no_optimizer(), **options)  # type: ignore[arg-type]


def test_a_fake_step_without_backward_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StepError, match="never called backward"):
        trace(model, lambda: model(torch.ones(1, 2)), fake=True)


def test_parameters_of_other_types_are_refused_by_name() -> None:
    class Special(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = Special(torch.zeros(2, 2))
    with pytest.raises(StepError, match=r"0\.weight cannot .* found Special"):
        trace(model, lambda: model(torch.ones(1, 2)).sum().backward(), fake=True)


def test_tied_and_viewed_parameters_are_one_storage() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    flat = torch.randn(32)
    model[0].weight.data, model[1].weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4)
    x = torch.randn(2, 4)
    traced = trace(model, lambda: F.relu(model(x)).sum().backward(), fake=True)
    assert [s.bytes for s in traced.storages if s.category is Category.PARAMETER] == [32 * 4]


def test_the_table_of_gpus_is_plausible() -> None:
    assert gpu_named("A100") is GPUS["a100-80gb"]
    for gpu in GPUS.values():
        assert gpu.half > gpu.single >= gpu.double
        assert gpu.half >= gpu.tf32 >= gpu.single
        assert 1e11 < gpu.bytes_per_s < 1e13


def fake_tensors() -> list[object]:
    gc.collect()
    return [o for o in gc.get_objects() if type(o).__name__ == "FakeTensor"]


def test_no_fake_tensor_survives() -> None:
    model, step = gpt()
    step()
    before = fake_tensors()  # torch.compile, run by other tests, keeps some; they are held here, so no address is used twice
    known = {id(o) for o in before}
    trace(model, step, fake=True)
    assert [o for o in fake_tensors() if id(o) not in known] == []


def test_a_step_with_sparse_tensors_is_said_to_need_a_real_trace() -> None:
    model, step = STEPS["sparse_gradients"]()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(StepError, match="sparse"):
        trace(model, step, fake=True)
    assert all(type(now) is nn.Parameter and now.equal(then) for now, then in zip(model.parameters(), before, strict=True))
