"""``checkpoint(..., use_reentrant=False)``: gradients, what is replayed when, and what is refused."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError


def test_gradients_equal_the_plain_ones(api):
    block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))
    x = torch.randn(3, 4, requires_grad=True)
    state = torch.get_rng_state()
    block(x).square().sum().backward()
    expected = [t.grad.clone() for t in (x, *block.parameters())]
    x.grad = None
    block.zero_grad()
    torch.set_rng_state(state)
    api.checkpoint(block, x, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip((x, *block.parameters()), expected, strict=True))


def test_keywords_and_structures_pass_through(api):
    def fn(k, tensors, *, scale):
        return {"out": torch.sin(tensors[0] * k) * scale["by"]}, "text", None

    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    out, text, nothing = api.checkpoint(fn, 2, [a], use_reentrant=False, scale={"by": b})
    assert (text, nothing) == ("text", None)
    grads = torch.autograd.grad(out["out"].sum(), (a, b))
    expected = torch.autograd.grad((torch.sin(a * 2) * b).sum(), (a, b))
    assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))


def test_the_function_runs_again_in_backward(api):
    runs = [0]

    def fn(x):
        runs[0] += 1
        return torch.sin(torch.exp(x))

    out = api.checkpoint(fn, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert runs == [1]
    out.sum().backward()
    assert runs == [2]


def test_nothing_is_replayed_when_nothing_was_saved(api):
    runs = [0]

    def fn(x):
        runs[0] += 1
        return x.clone() + 1

    api.checkpoint(fn, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert runs == [1]


@pytest.mark.parametrize(
    ("by_context", "by_call", "tail_runs"),
    [(None, True, 1), (None, False, 2), (False, True, 2), (True, False, 1), ((False, True), False, 1)],
)
def test_early_stop(api, by_context, by_call, tail_runs):
    tail = [0]

    def fn(x):
        x = torch.cos(torch.sin(x))
        tail[0] += 1
        return x + 1

    contexts = [] if by_context is None else [by_context] if isinstance(by_context, bool) else by_context
    with contextlib.ExitStack() as stack:
        for enable in contexts:
            stack.enter_context(api.set_checkpoint_early_stop(enable))
        out = api.checkpoint(fn, torch.ones(2, requires_grad=True), use_reentrant=False, early_stop=by_call)
    out.sum().backward()
    assert tail == [tail_runs]


def test_the_replay_stops_before_the_op_that_needs_only_inputs_is_run(api):
    class Sines(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.sin.default
            return func(*args, **(kwargs or {}))

    with Sines() as mode:
        api.checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert mode.count == 1


def test_each_backward_replays_once(api):
    runs = [0]

    def fn(x):
        runs[0] += 1
        return torch.sin(torch.exp(torch.sin(x)))

    x = torch.ones(2, requires_grad=True)
    out = api.checkpoint(fn, x, use_reentrant=False).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    second = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert runs == [3]
    assert torch.equal(first, second)


def test_a_saved_tensor_read_outside_of_backward_is_replayed_each_time(api):
    runs = [0]

    def fn(x):
        runs[0] += 1
        return torch.exp(x)

    out = api.checkpoint(fn, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert torch.equal(out.grad_fn._saved_result, out)
    assert torch.equal(out.grad_fn._saved_result, out)
    assert runs == [3]
    out.sum().backward()
    assert runs == [4]
    with pytest.raises(RuntimeError, match="already been freed"):
        _ = out.grad_fn._saved_result


def test_a_tensor_that_needs_no_gradient_comes_back_as_the_same_object(api):
    seen = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.save_for_backward(other)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.extend(ctx.saved_tensors)
            return grad, None

    other = torch.ones(1)
    api.checkpoint(Keeps.apply, torch.ones(1, requires_grad=True), other, use_reentrant=False).backward()
    assert seen[0] is other


def test_saved_tensors_may_be_read_once_in_a_backward(api):
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (_,) = ctx.saved_tensors
            with pytest.raises(CheckpointError, match="already unpacked once"):
                _ = ctx.saved_tensors
            return grad * 2

    api.checkpoint(lambda x: Reads.apply(torch.sin(x)), torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def test_hooks_of_a_parameter_used_inside_and_outside_run_once(api):
    weight = torch.randn(3, requires_grad=True)
    calls = []
    weight.register_hook(calls.append)
    h = weight * torch.randn(3, requires_grad=True)
    api.checkpoint(lambda x: torch.sin(weight * x), h, use_reentrant=False).sum().backward()
    assert len(calls) == 1


def test_hooks_on_inner_nodes_belong_to_the_original_graph(api):
    calls = []
    out = api.checkpoint(lambda x: torch.sin(torch.cos(x)), torch.ones(2, requires_grad=True), use_reentrant=False)
    out.grad_fn.next_functions[0][0].register_hook(lambda *_: calls.append(1))
    out.sum().backward()
    assert calls == [1]


def test_a_backward_started_by_a_hook_in_a_backward(api):
    def fn(a):
        x = torch.cos(torch.sin(a))
        return x, torch.sin(x)

    a = torch.ones(2, requires_grad=True)
    x, out = api.checkpoint(fn, a, use_reentrant=False)
    out.grad_fn.register_hook(lambda *_: x.backward(torch.ones(2), retain_graph=True))
    out.sum().backward(retain_graph=True)
    x2, out2 = fn(b := torch.ones(2, requires_grad=True))
    (x2.sum() + out2.sum()).backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_is_as_it_was(api, enabled):
    seen = []

    def fn(x, weight):
        y = x @ weight
        seen.append(y.dtype)
        return torch.sin(y)

    x, weight = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        out = api.checkpoint(fn, x, weight, use_reentrant=False)
    out.float().sum().backward()
    assert seen == [torch.bfloat16 if enabled else torch.float32] * 2


@pytest.mark.parametrize("preserve", [True, False])
def test_random_state_is_preserved_unless_told_otherwise(api, preserve):
    drawn = []

    def fn(x):
        mask = torch.rand(8)
        drawn.append(mask)
        return torch.sin(x * mask)

    out = api.checkpoint(fn, torch.ones(8, requires_grad=True), use_reentrant=False, preserve_rng_state=preserve)
    after = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(drawn[0], drawn[1]) == preserve
    assert torch.equal(torch.get_rng_state(), after) or not preserve


class _Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_context_fn_gives_a_context_for_the_forward_and_one_for_the_replay(api):
    in_forward, in_replay = _Ops(), _Ops()
    x = torch.ones(2, requires_grad=True)
    out = api.checkpoint(torch.exp, x, use_reentrant=False, context_fn=lambda: (in_forward, in_replay))
    assert in_forward.names == ["exp.default"]
    out.sum().backward()
    assert in_forward.names == ["exp.default"]
    assert in_replay.names[0] == "exp.default"


def test_the_forward_context_sees_an_error_and_must_not_swallow_it(api):
    left = []

    class Swallows:
        def __enter__(self):
            return self

        def __exit__(self, kind, *_):
            left.append(kind)
            return True

    def fails(_):
        raise ValueError("from the function")

    if api is torch.utils.checkpoint and not hasattr(api, "_CONSUMED"):
        pytest.skip("before torch 2.13 its own hooks were left behind")
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="suppressed an exception"):
        api.checkpoint(fails, x, use_reentrant=False, context_fn=lambda: (Swallows(), contextlib.nullcontext()))
    with pytest.raises(ValueError, match="from the function"):
        api.checkpoint(fails, x, use_reentrant=False)
    assert left == [ValueError]


def test_no_region_where_no_gradients_are_recorded(api):
    entered = []

    @contextlib.contextmanager
    def context():
        entered.append(1)
        yield

    with torch.no_grad():
        out = api.checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False, context_fn=lambda: (context(), context()))
    assert not out.requires_grad
    assert entered == []


def _changes(first, later):
    runs = [0]

    def fn(x):
        runs[0] += 1
        return (first if runs[0] == 1 else later)(x)

    return fn


def _three(x):
    return torch.sin(torch.exp(torch.sin(x)))


def _two(x):
    return torch.exp(torch.sin(x))


def _other_shape(x):
    return torch.sin(x) * torch.tensor([1.0, 2.0])


def test_a_replay_that_saves_fewer_tensors_is_an_error(api):
    out = api.checkpoint(_changes(_three, _two), torch.ones(1, requires_grad=True), use_reentrant=False)
    with pytest.raises(CheckpointError, match="A different number of tensors was saved") as caught:
        out.sum().backward()
    assert torch.utils.checkpoint._debug_tip_msg in str(caught.value)


def test_a_replay_that_saves_more_tensors_is_an_error_unless_it_stops_early(api):
    x = torch.ones(1, requires_grad=True)
    out = api.checkpoint(_changes(_two, _three), x, use_reentrant=False, early_stop=False)
    with pytest.raises(CheckpointError, match="trying to save more tensors"):
        out.sum().backward()
    api.checkpoint(_changes(_two, _three), x, use_reentrant=False).sum().backward()


def test_a_replay_that_saves_other_shapes_is_an_error_unless_unchecked(api):
    x = torch.ones(1, requires_grad=True)
    out = api.checkpoint(_changes(_two, _other_shape), x, use_reentrant=False)
    with pytest.raises(CheckpointError, match="have different metadata"):
        out.sum().backward()
    lenient = api.checkpoint(_changes(_two, lambda t: torch.exp(torch.sin(t.double()))), x, use_reentrant=False, determinism_check="none")
    with contextlib.suppress(RuntimeError):
        lenient.sum().backward()


@pytest.fixture
def own_log(request, monkeypatch):
    """PyTorch logs ops in a form that only its own handler can read: pytest's handlers must not try."""
    plugin = request.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (plugin.caplog_handler, plugin.report_handler):
        monkeypatch.setattr(handler, "level", logging.CRITICAL)


@pytest.mark.usefixtures("own_log")
def test_the_debug_log_lists_the_ops_of_both_passes(api):
    x = torch.ones(1, requires_grad=True)
    out = api.checkpoint(_changes(_two, _other_shape), x, use_reentrant=False, debug=True)
    with pytest.raises(CheckpointError, match="debug=True") as caught:
        out.sum().backward()
    assert "aten.exp" in str(caught.value)
    assert "aten.sin" in str(caught.value)


@pytest.mark.usefixtures("own_log")
def test_debug_can_be_forced_on_and_off(api):
    x = torch.ones(1, requires_grad=True)
    with api.set_checkpoint_debug_enabled(True):
        out = api.checkpoint(_changes(_two, _other_shape), x, use_reentrant=False)
    with pytest.raises(CheckpointError, match="debug=True"):
        out.sum().backward()
    with api.set_checkpoint_debug_enabled(False):
        out = api.checkpoint(_changes(_two, _other_shape), x, use_reentrant=False, debug=True)
    with pytest.raises(CheckpointError, match="have different metadata"):
        out.sum().backward()


def test_options_that_cannot_be(api):
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(ValueError, match="determinism_check"):
        api.checkpoint(torch.sin, x, use_reentrant=False, determinism_check="strict")
    with pytest.raises(ValueError, match="incompatible with non-default context_fn"):
        api.checkpoint(torch.sin, x, use_reentrant=False, debug=True, context_fn=lambda: (_Ops(), _Ops()))


def test_an_input_changed_before_backward_is_an_error(api):
    leaf = torch.ones(3, requires_grad=True)
    x = leaf * 1
    out = api.checkpoint(lambda t: torch.sin(torch.exp(t)), x, use_reentrant=False)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backward", [False, True])
def test_the_graph_dies_without_the_garbage_collector(api, backward):
    if api.__name__ == "torch.utils.checkpoint" and backward:
        pytest.skip("its early stop leaves a cycle")

    class Tag:
        pass

    def scope():
        out = api.checkpoint(lambda t: torch.sin(torch.exp(t)), torch.ones(3, requires_grad=True), use_reentrant=False)
        tags = [Tag(), Tag()]
        out.grad_fn.metadata["tag"], out.grad_fn.next_functions[0][0].metadata["tag"] = tags
        if backward:
            out.sum().backward(retain_graph=True)
        return [weakref.ref(tag) for tag in tags]

    gc.collect()
    gc.disable()
    try:
        assert all(reference() is None for reference in scope())
    finally:
        gc.enable()


def test_data_parallel_inside(api):
    model = nn.DataParallel(nn.Linear(2, 2))
    x = torch.randn(2, 2, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    api.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, expected)


def test_not_saying_which_form_is_warned_about(api):
    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"):
        api.checkpoint(torch.sin, torch.ones(1, requires_grad=True))
