"""What surrounded the forward (modes, contexts, defaults) surrounds its replay, though it is gone by the time backward runs."""

from __future__ import annotations

import contextlib
import contextvars

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_SCALE = contextvars.ContextVar("_SCALE", default=1.0)
_ADAPTER: contextvars.ContextVar[nn.Linear | None] = contextvars.ContextVar("_ADAPTER", default=None)


@contextlib.contextmanager
def _value(variable, value):
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _steps(run, contexts, make=lambda: torch.randn(3, 4, requires_grad=True)):
    seen = []
    for context in contexts:
        x = make()
        with context():
            out = run(x)
        out.float().square().sum().backward()
        seen.append((out, x.grad))
    return seen


def test_a_context_variable(compare):
    def scenario(region):
        run = region(lambda x: torch.sin(x * _SCALE.get()))
        return _steps(run, [lambda s=s: _value(_SCALE, float(s)) for s in (2, 3, 4, 5)])

    compare(scenario)


def test_a_context_variable_that_is_first_set_after_some_calls(compare):
    def scenario(region):
        run = region(lambda x: torch.sin(x * _SCALE.get()))
        return _steps(run, [contextlib.nullcontext] * 3 + [lambda: _value(_SCALE, 7.0)])

    compare(scenario)


def test_the_active_adapter_held_in_a_context(compare):
    def scenario(region):
        base = nn.Linear(4, 4)
        adapters = [nn.Linear(4, 4, bias=False) for _ in range(2)]

        def layer(x):
            adapter = _ADAPTER.get()
            return torch.tanh(base(x) + (adapter(x) if adapter is not None else 0))

        seen = _steps(region(layer), [lambda a=a: _value(_ADAPTER, a) for a in (*adapters, None, *adapters)])
        return seen, [p.grad for m in (base, *adapters) for p in m.parameters()]

    compare(scenario)


class _DoubleSin(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.sin else out


class _DoubleExp(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.exp.default else out


@pytest.mark.parametrize("mode", [_DoubleSin, _DoubleExp])
def test_a_function_or_dispatch_mode(compare, mode):
    def scenario(region):
        run = region(lambda x: torch.exp(torch.sin(x)).cos())
        return _steps(run, [mode, contextlib.nullcontext, mode, mode])

    compare(scenario)


@pytest.mark.parametrize("mode", [_DoubleSin, _DoubleExp])
def test_a_mode_that_is_still_active_in_backward_is_not_applied_twice(compare, mode):
    def scenario(region):
        run = region(lambda x: torch.exp(torch.sin(x)).cos())
        seen = []
        for _ in range(3):
            x = torch.randn(4, requires_grad=True)
            with mode():
                run(x).sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


def test_the_attention_backend(compare):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def scenario(region):
        run = region(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True).tanh())
        contexts = [lambda b=b: sdpa_kernel([b]) for b in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)]
        return _steps(run, contexts, make=lambda: torch.randn(1, 2, 8, 4, requires_grad=True))

    compare(scenario)


@contextlib.contextmanager
def _default_dtype(dtype):
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def test_the_default_dtype(compare):
    def scenario(region):
        run = region(lambda x: torch.sin(x.to(torch.get_default_dtype()) * torch.tensor([1.0, 2.0, 3.0, 4.0])))
        return _steps(run, [lambda: _default_dtype(torch.float64), contextlib.nullcontext, lambda: _default_dtype(torch.float64)])

    compare(scenario)


def test_the_default_device():
    import lowtide

    def fn(x):
        made = torch.ones(4)
        return torch.sin(x) * made.numel() if made.device.type == "meta" else torch.sin(x) * made

    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        x.grad = None
        with torch.device("meta"):
            out = lowtide.checkpoint(fn)(x)
        out.sum().backward()
        torch.testing.assert_close(x.grad, torch.cos(x.detach()) * 4)


def test_autocast(compare):
    def scenario(region):
        block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        contexts = [lambda: torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext, lambda: torch.autocast("cpu", torch.float16)]
        return _steps(region(block), contexts), [p.grad for p in block.parameters()]

    compare(scenario)


def test_an_autocast_weight_cache_that_is_warm_in_forward_and_cold_in_replay(compare):
    def scenario(region):
        shared = nn.Linear(4, 4)
        run = region(lambda x: torch.tanh(shared(x)))
        seen = []
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                out = run(run(shared(x)))
            out.float().sum().backward()
            seen.append((out, x.grad))
        return seen, [p.grad for p in shared.parameters()]

    compare(scenario)


def test_an_autocast_weight_cache_that_is_cold_in_forward_and_warm_in_replay(compare):
    def scenario(region):
        shared = nn.Linear(4, 4)
        run = region(lambda x: torch.tanh(shared(x)))
        seen = []
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            with torch.autocast("cpu", torch.bfloat16):
                out = shared(run(x))
                out.float().sum().backward()
            seen.append((out, x.grad))
        return seen, [p.grad for p in shared.parameters()]

    compare(scenario)


def test_parts_without_gradients_inside_the_region(compare, train):
    def scenario(region):
        linear = nn.Linear(4, 4)

        def fn(x):
            with torch.no_grad():
                scale = torch.sigmoid(linear(x)).mean()
            return torch.tanh(linear(x) * scale)

        return train(region(fn), linear)

    compare(scenario)


def test_anomaly_mode(compare):
    def scenario(region):
        run = region(lambda x: torch.sin(torch.cos(x)))
        seen = []
        for _ in range(3):
            x = torch.randn(4, requires_grad=True)
            with torch.autograd.detect_anomaly(check_nan=True):
                run(x).sum().backward()
            seen.append(x.grad)
        return seen

    with pytest.warns(UserWarning, match="Anomaly"):
        compare(scenario)


def test_the_settings_of_autocast_are_as_they_were_after_a_backward(compare):
    def scenario(region):
        layer = nn.Linear(4, 4)
        run, seen = region(lambda x: layer(layer(x).sin()).float()), []
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = run(x) + layer(x).float()
            y.sum().backward()
            seen.append([x.grad, layer.weight.grad.clone(), torch.is_autocast_cache_enabled(), torch.is_autocast_enabled("cpu")])
            layer.zero_grad()
        return seen

    compare(scenario)
