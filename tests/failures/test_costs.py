"""What checkpointing should not cost: extra replays, memory that piles up, work without gradients, names."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lowtide


class _Runs:
    """Counts runs of a region's function: ``forward`` and ``replay``."""

    forward = 0
    replay = 0
    tail = 0


def _counted(x):
    if lowtide.is_replaying():
        _Runs.replay += 1
    else:
        _Runs.forward += 1
    early = torch.sin(torch.sin(x))
    late = torch.exp(torch.cos(early))
    _Runs.tail += lowtide.is_replaying()
    return early, torch.sin(late)


@pytest.fixture
def counted():
    """A region that has been through its audited calls, with the counts at zero."""
    run = lowtide.checkpoint(_counted)
    for _ in range(4):
        one, two = run(torch.randn(4, requires_grad=True))
        (one + two).sum().backward()
    _Runs.forward = _Runs.replay = _Runs.tail = 0
    return run


def test_one_replay_a_backward(counted):
    one, two = counted(torch.randn(4, requires_grad=True))
    (one + two).sum().backward()
    assert (_Runs.forward, _Runs.replay) == (1, 1)


def test_one_replay_serves_two_losses(counted):
    one, two = counted(torch.randn(4, requires_grad=True))
    two.sum().backward(retain_graph=True)
    one.sum().backward()
    assert _Runs.replay <= 2


def test_a_split_backward_replays_once(counted):
    x = torch.randn(4, requires_grad=True)
    one, two = counted(x)
    (middle,) = torch.autograd.grad(two.sum(), one, retain_graph=True)
    torch.autograd.grad(one, x, middle)
    assert _Runs.replay == 1


def test_the_gradient_of_an_early_output_replays_only_what_it_needs(counted):
    x = torch.randn(4, requires_grad=True)
    one, two = counted(x)
    del two
    one.sum().backward()
    assert torch.equal(x.grad, torch.cos(torch.sin(x.detach())) * torch.cos(x.detach()))
    assert _Runs.tail == 0


def test_no_replay_and_no_hold_under_no_grad(counted):
    x = torch.randn(4)
    alive = weakref.ref(x)
    with torch.no_grad():
        one, two = counted(x)
    assert not one.requires_grad
    assert not two.requires_grad
    del x
    assert alive() is None
    assert (_Runs.forward, _Runs.replay) == (1, 0)


def test_eval_mode_follows_whether_gradients_are_recorded(compare):
    def scenario(region):
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh()).eval()
        run = region(block)
        x = torch.randn(3, 4, requires_grad=True)
        run(x).sum().backward()
        with torch.no_grad():
            silent = run(x)
        with torch.inference_mode():
            silent_too = run(torch.ones(1, 4)).clone()
        return x.grad, silent, silent_too

    compare(scenario)


def test_what_the_region_drops_is_not_alive_before_backward():
    kept = []

    def fn(x):
        h = torch.sin(x * 2)
        kept.append(weakref.ref(h))
        return torch.sin(h) * 1

    run = lowtide.checkpoint(fn)
    for _ in range(4):
        kept.clear()
        out = run(torch.randn(4, requires_grad=True))
        assert kept[0]() is None
        out.sum().backward()


def _storages_alive():
    gc.collect()
    return {id(o) for o in gc.get_objects() if issubclass(type(o), torch.Tensor)}


@pytest.mark.parametrize("partial", [True, False])
def test_a_retained_graph_does_not_pile_up_replayed_tensors(partial):
    run = lowtide.checkpoint(lambda x: (torch.sin(torch.sin(x)), torch.exp(torch.sin(torch.cos(x)))))
    x = torch.randn(4, requires_grad=True)
    one, two = run(x)
    loss = one if partial else one + two
    torch.autograd.grad(loss.sum(), x, retain_graph=True)
    torch.autograd.grad(loss.sum(), x, retain_graph=True)
    before = len(_storages_alive())
    for _ in range(5):
        torch.autograd.grad(loss.sum(), x, retain_graph=True)
    assert len(_storages_alive()) <= before


def test_saved_tensor_hooks_around_a_region_get_all_that_it_holds():
    """As with ``save_on_cpu``: what a region keeps for its replay passes through the hooks that surround it."""
    packed = set()

    def pack(tensor):
        packed.add(tensor.data_ptr())
        return tensor.clone()

    inner = lowtide.checkpoint(lambda h: torch.sin(torch.sin(h)))

    def fn(x, *, mask, batch):
        return inner(torch.sin(x * mask) * batch["scale"][0])

    run = lowtide.checkpoint(fn)
    for _ in range(4):
        packed.clear()
        leaf = torch.randn(4, requires_grad=True)
        x, mask, scale = leaf * 2, torch.rand(4), torch.rand(4)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = run(x, mask=mask, batch={"scale": [scale]})
        expected = torch.autograd.grad(torch.sin(torch.sin(torch.sin(leaf * 2 * mask) * scale)).sum(), leaf)[0]
        assert {x.data_ptr(), mask.data_ptr(), scale.data_ptr()} <= packed
        x.detach().zero_(), mask.zero_(), scale.zero_()
        out.sum().backward()
        torch.testing.assert_close(leaf.grad, expected)


def test_save_on_cpu_around_regions(compare, train):
    def scenario(region):
        block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 4))
        run = region(block)
        outer = region(lambda x: torch.sin(run(torch.sin(x))))

        def call(x):
            with torch.autograd.graph.save_on_cpu():
                return outer(x)

        return train(call, block)

    compare(scenario)


def test_save_on_cpu_inside_a_region(compare, train):
    def scenario(region):
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def fn(x):
            with torch.autograd.graph.save_on_cpu():
                return torch.sin(block(x))

        return train(region(fn), block)

    compare(scenario)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_inside_a_region(compare, backend):
    def scenario(region):
        torch._dynamo.reset()
        weight = torch.randn(4, 4, requires_grad=True)
        compiled = torch.compile(lambda x: torch.sin(torch.tanh(x @ weight)), backend=backend)
        run = region(lambda x: torch.sin(compiled(x)))
        seen = []
        for _ in range(4):
            x = torch.randn(2, 4, requires_grad=True)
            run(x).sum().backward()
            seen.append((x.grad, weight.grad.clone()))
        return seen

    compare(scenario)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_a_region_inside_a_compiled_function(compare):
    def scenario(region):
        torch._dynamo.reset()
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        run = region(block)
        compiled = torch.compile(lambda x: torch.sin(run(torch.sin(x))), backend="eager")
        seen = []
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            compiled(x).sum().backward()
            seen.append((x.grad, [p.grad.clone() for p in block.parameters()]))
        return seen

    compare(scenario)


class _Products(TorchDispatchMode):
    """Matrix products, those of replays apart."""

    def __init__(self):
        super().__init__()
        self.of_the_model = self.replayed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.of_the_model += not lowtide.is_replaying()
            self.replayed += lowtide.is_replaying()
        return func(*args, **(kwargs or {}))


def test_flops_of_the_model_and_of_the_replay_can_be_told_apart():
    block = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh())
    flops_of_a_product = 2 * 2 * 8 * 8

    def count(run):
        with FlopCounterMode(display=False) as flops, _Products() as products:
            run(torch.randn(2, 8, requires_grad=True)).sum().backward()
        return flops.get_total_flops(), products

    run = lowtide.checkpoint(block)
    for _ in range(3):
        run(torch.randn(2, 8, requires_grad=True)).sum().backward()
    plain_flops, plain = count(block)
    flops, products = count(run)
    assert plain.replayed == 0
    assert products.replayed > 0
    assert products.of_the_model == plain.of_the_model
    assert flops == plain_flops + products.replayed * flops_of_a_product


def test_a_replay_is_labelled_in_profiles():
    run = lowtide.checkpoint(lambda x: torch.sin(torch.sin(x)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run(torch.randn(4, requires_grad=True)).sum().backward()
    assert any(event.name.startswith("lowtide::") for event in profile.events())


def test_names_and_types_of_modules_do_not_change():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    names, types = list(model.state_dict()), [type(m) for m in model.modules()]
    model[0].forward = lowtide.checkpoint(model[0].forward)
    model(torch.randn(2, 4)).sum().backward()
    assert list(model.state_dict()) == names
    assert [type(m) for m in model.modules()] == types
    assert model[0][0].weight.grad is not None


def test_a_region_keeps_its_functions_name_and_signature():
    import inspect

    def attention(x, mask=None, *, scale: float = 1.0):
        """Attends."""
        return x

    run = lowtide.checkpoint(attention)
    assert inspect.signature(run) == inspect.signature(attention)
    assert (run.__name__, run.__doc__) == ("attention", "Attends.")


def _three_steps(run):
    for _ in range(3):
        run(torch.randn(64, 64, requires_grad=True)).sum().backward()


def _deep_model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)])


def test_one_region_over_everything_is_warned_about():
    with pytest.warns(UserWarning, match="only one of its step"):
        _three_steps(lowtide.checkpoint(_deep_model()))


def test_regions_over_parts_are_not_warned_about():
    first, second = _deep_model(), _deep_model()
    run_first, run_second = lowtide.checkpoint(first), lowtide.checkpoint(second)
    _three_steps(lambda x: run_second(run_first(x)))
    _three_steps(lambda x: second(run_first(x)))
    _three_steps(lambda x: run_second(first(x)))


def test_a_counter_around_the_backward_alone_sees_the_replay():
    weight = torch.randn(8, 8, requires_grad=True)
    run = lowtide.checkpoint(lambda x: torch.sin(x @ weight))
    for _ in range(3):
        out = run(torch.randn(2, 8, requires_grad=True)).sum()
        with FlopCounterMode(display=False) as flops:
            out.backward()
        assert flops.get_total_flops() == 3 * (2 * 2 * 8 * 8)
