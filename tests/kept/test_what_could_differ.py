"""Each kind of thing that goes wrong with kept results elsewhere, against the plain run."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.engine import checkpoint, install, kept_sites
from lowtide.errors import InvalidInputError
from lowtide.records import Decision

from .conftest import Choose, assert_same, costly, costly_calls, everything, function, module


def _of(fn, shape=(3, 4)):
    """A scenario around a function of one tensor."""

    def scenario(region):
        run = region(fn)

        def step():
            x = torch.randn(*shape, requires_grad=True)
            y = run(x * 1)
            y.square().sum().backward()
            return [y, x.grad]

        return step

    return scenario


class TestChangedInPlaceLater:
    """The kept result is written to: by the region, through a view, or by whoever got it."""

    @pytest.mark.parametrize("rule", [function("mul"), everything])
    @pytest.mark.parametrize(
        "change",
        [
            lambda y: y.relu_(),
            lambda y: y.t()[1].mul_(0.5) is None or y,
            lambda y: y[:, 1:].tanh_() is None or y,
            lambda y: F.dropout(y, 0.5, inplace=True),
            lambda y: y.detach().mul_(2) is None or y,
        ],
    )
    def test_in_the_region(self, compare, rule, change):
        compare(_of(lambda x: torch.exp(torch.sin(change(torch.cos(x) * 2)))), rule)

    def test_after_the_region(self, compare):
        def scenario(region):
            run = region(lambda x: torch.add(torch.tanh(torch.cos(x)), 1.0))

            def step():
                x = torch.randn(3, 4, requires_grad=True)
                y = run(x * 1)
                y.mul_(2)
                y.sum().backward()
                return [y, x.grad]

            return step

        compare(scenario, everything)

    def test_after_the_region_while_the_replay_needs_it(self, compare):
        def fn(x):
            y = torch.cos(x)
            return y, torch.tanh(torch.sin(y * 2))

        def scenario(region):
            run = region(fn)

            def step():
                x = torch.randn(3, 4, requires_grad=True)
                y, z = run(x * 1)
                y.mul_(2)
                (y.sum() + z.square().sum()).backward()
                return [y, z, x.grad]

            return step

        compare(scenario, function("cos"))

    def test_it_is_copied_and_not_computed_again(self, runs):
        run = checkpoint(lambda x: torch.exp(torch.sin(costly(torch.cos(x)).relu_())), policy=Choose(costly_calls))
        for _ in range(3):
            before = runs[0]
            run(torch.ones(3, requires_grad=True) * 1).sum().backward()
        assert runs[0] - before == 1

    def test_a_result_that_is_sometimes_the_argument_itself(self, compare):
        flips = [True]

        def fn(x):
            h = torch.cos(x).t() if flips[0] else torch.cos(x)
            c = h.contiguous()
            c.mul_(2)
            return torch.exp(torch.sin(h * c))

        def scenario(region):
            turn, step = [0], _of(fn)(region)

            def flipping():
                turn[0] += 1
                flips[0] = turn[0] % 2 == 1
                return step()

            return flipping

        compare(scenario, function("contiguous"), steps=6)

    def test_between_forward_and_a_second_backward(self):
        def fn(x):
            return torch.sin(torch.tanh(torch.cos(x))), torch.cos(x)

        results = []
        for call in (fn, checkpoint(fn, policy=Choose(everything))):
            for _ in range(3):
                x = torch.linspace(-1, 1, 5).requires_grad_()
                one, two = call(x * 1)
                first = torch.autograd.grad(one.sum(), x, retain_graph=True)[0]
                with torch.no_grad():
                    two.zero_()
                second = torch.autograd.grad(one.sum(), x)[0]
            results.append([first, second])
        assert_same(results[1], results[0])

    def test_an_op_that_writes_to_its_argument_is_no_site(self):
        policy = Choose(everything)
        checkpoint(lambda x: torch.sin((x * 2).mul_(3).relu_()), policy=policy)(torch.ones(3, requires_grad=True))
        assert [site.function_name.split(".")[-1] for site in policy.asked] == ["mul", "sin"]


class TestRandom:
    """Every op gets the draw that it had, kept or not."""

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_dropout(self, compare, index):
        def fn(x):
            for p in (0.2, 0.5, 0.7):
                x = F.dropout(torch.tanh(x), p) * torch.rand(3, 4)
            return torch.sin(x)

        compare(_of(fn), lambda site: site.random and site.index == index)

    def test_private_generators(self, compare):
        def scenario(region):
            generator = torch.Generator().manual_seed(3)

            def fn(x):
                for _ in range(2):
                    x = torch.sin(x * torch.rand(3, 4, generator=generator))
                return torch.exp(x)

            return _of(fn)(region)

        compare(scenario, lambda site: site.level == "function" and site.random and site.index == 0)

    def test_a_module_that_draws(self, compare):
        def scenario(region):
            block = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.3)), nn.Dropout(0.5), nn.Tanh())
            return _of(block)(region)

        compare(scenario, module(nn.Sequential))

    def test_noise_that_is_filled_after_it_was_saved(self, compare):
        compare(_of(lambda x: torch.exp(F.rrelu(torch.cos(x), training=True))), everything)

    def test_inside_a_kept_module_that_begins_after_the_first_calls(self, compare):
        noise = [0]

        class Noisy(nn.Module):
            def forward(self, x):
                return torch.sin(x * torch.rand(3, 4) if noise[0] > 4 else x)

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.noisy = Noisy()

            def forward(self, x):
                x = torch.tanh(self.noisy(torch.cos(x)))
                return torch.exp(x * torch.rand(3, 4) if noise[0] > 4 else x)

        def scenario(region):
            noise[0], step = 0, _of(Whole())(region)

            def noisier():
                noise[0] += 1
                return step()

            return noisier

        compare(scenario, module(Noisy), steps=8)

    def test_that_begins_after_the_first_calls(self, compare):
        def scenario(region):
            noise = [0]

            def fn(x):
                x = F.dropout(torch.cos(x), 0.5, training=noise[0] > 4) * 2
                return torch.sin(F.dropout(torch.tanh(x), 0.5, training=noise[0] > 4))

            inner = _of(fn)(region)

            def step():
                noise[0] += 1
                return inner()

            return step

        compare(scenario, function("dropout", "mul"), steps=8)


class TestState:
    """What a call does besides returning something."""

    @pytest.mark.parametrize("rule", [function("batch_norm"), module(nn.BatchNorm1d), everything])
    def test_batch_statistics(self, compare, rule):
        def scenario(region):
            block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())
            inner = _of(block, (6, 4))(region)
            return lambda: [*inner(), *(b.clone() for b in block.buffers())]

        compare(scenario, rule)

    def test_a_module_that_changes_its_attributes_is_run_again_and_says_so(self):
        class Counter(nn.Module):
            def __init__(self):
                super().__init__()
                self.calls = 0

            def forward(self, x):
                self.calls += 1
                return torch.sin(x * self.calls)

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.counter = Counter()

            def forward(self, x):
                return torch.exp(torch.tanh(self.counter(x)) * self.counter.calls)

        grads = []
        for region in (lambda fn: fn, lambda fn: checkpoint(fn, policy=Choose(module(Counter)))):
            run, seen = region(Outer()), []
            for _ in range(3):
                x = torch.ones(3, requires_grad=True)
                if seen or run.__class__ is Outer:
                    run(x * 1).sum().backward()
                else:
                    with pytest.warns(UserWarning, match="cannot be kept: its forward changes counter.calls"):
                        run(x * 1).sum().backward()
                seen.append(x.grad)
            grads.append(seen)
        assert_same(grads[1], grads[0])

    def test_an_attention_with_a_router(self, compare):
        def scenario(region):
            experts, gate = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 3)

            def fn(x):
                weights, chosen = torch.topk(torch.softmax(gate(x), dim=-1), 2)
                parts = [torch.where((chosen == i).any(-1, keepdim=True), torch.tanh(expert(x)), 0.0) for i, expert in enumerate(experts)]
                return torch.sin(sum(parts) * weights.sum(-1, keepdim=True))

            inner = _of(fn)(region)
            owner = nn.ModuleList([experts, gate])

            def step():
                owner.zero_grad()
                return [*inner(), *(p.grad for p in owner.parameters())]

            return step

        compare(scenario, function("topk", "softmax"))


def test_functions_that_are_called_in_a_kept_module_and_after_it(compare):
    class Part(nn.Module):
        def forward(self, x):
            return torch.sin(torch.tanh(x))

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Part()

        def forward(self, x):
            x = torch.tanh(self.part(torch.cos(x)))
            return torch.sin(torch.tanh(x * 2) * torch.exp(x))

    kept_module = module(Part)
    compare(_of(Whole()), lambda site: kept_module(site) or function("tanh")(site))


def test_views_of_kept_results(compare):
    def fn(x):
        y = torch.cos(x) * 2
        a, b = y.chunk(2, dim=1)
        return torch.tanh(torch.exp(a) @ torch.sin(b).t()).t().contiguous()

    compare(_of(fn), everything)


def test_arguments_that_are_views(compare):
    def fn(x):
        h = torch.tanh(x)
        a, b = h.view(3, 2, 2).unbind(1)
        y = F.linear(h.t().contiguous().t(), torch.ones(4, 4)) + torch.matmul(h[:, :2], torch.ones(2, 4))
        return torch.exp(torch.cat([a * b, b.relu()], dim=1) * y.sigmoid())

    compare(_of(fn), everything)


def test_data_dependent_control_flow(compare):
    def scenario(region):
        turn = [0]

        def fn(x):
            x = torch.cos(x)
            for _ in range(turn[0] % 3):
                x = torch.sin(torch.tanh(x))
            if x.sum().item() > 0:
                x = torch.tanh(x * 2)
            return torch.exp(x)

        inner = _of(fn)(region)

        def step():
            turn[0] += 1
            return inner()

        return step

    compare(scenario, everything, steps=12)


def test_shapes_that_change(compare):
    def scenario(region):
        linear, length = nn.Linear(4, 4), [1]
        run = region(lambda x: torch.sin(linear(torch.tanh(linear(x)))))

        def step():
            length[0] += 1
            linear.zero_grad()
            x = torch.randn(2, length[0], 4, requires_grad=True)
            run(x * 1).square().sum().backward()
            return [x.grad, *(p.grad for p in linear.parameters())]

        return step

    compare(scenario, function("linear", "tanh"), steps=5)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.scale = 2.0
        return x.sin() * ctx.scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos() * ctx.scale


class _Kernel(nn.Module):
    """As a kernel of somebody else's comes: a custom function behind a module, no op registered."""

    def forward(self, x):
        return _Double.apply(torch.cos(x))


@pytest.mark.parametrize("rule", [function("tanh"), module(_Kernel), everything])
def test_custom_autograd_functions(compare, rule):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = _Kernel()

        def forward(self, x):
            return torch.exp(torch.tanh(self.kernel(torch.sin(x))))

    compare(_of(Outer()), rule)


class TestNested:
    """Regions in regions, and other hooks around."""

    @pytest.mark.parametrize("rule", [function("sin"), function("cos"), everything])
    @pytest.mark.parametrize("where", ["inside", "outside", "both"])
    def test_regions(self, compare, rule, where):
        def scenario(region):
            plain = checkpoint if region(torch.sin) is not torch.sin else lambda fn: fn
            inner = (plain if where == "outside" else region)(lambda x: F.dropout(torch.sin(torch.tanh(torch.cos(x))), 0.5))
            middle = plain(lambda x: torch.tanh(inner(torch.sin(x)) * 2))
            outer = (plain if where == "inside" else region)(lambda x: torch.cos(middle(torch.sin(x))) * inner(x))
            return _of(lambda x: torch.exp(outer(x)))(lambda fn: fn)

        compare(scenario, rule, steps=4)

    def test_a_kept_module_with_a_region_inside(self, compare):
        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x):
                return torch.sin(self.linear(torch.cos(x)))

        class Middle(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Inner()
                install([("inner", self.inner)])

            def forward(self, x):
                return torch.tanh(self.inner(torch.sin(x)))

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.middle = Middle()

            def forward(self, x):
                return torch.exp(self.middle(torch.cos(x)))

        compare(_of(Outer()), module(Middle), steps=4)

    def test_offloading_hooks_around_are_handed_what_is_kept(self, runs):
        packed = []

        def pack(tensor):
            packed.append(tensor.shape)
            return tensor.detach().clone()

        run = checkpoint(lambda x: torch.exp(torch.tanh(costly(torch.cos(x)))), policy=Choose(costly_calls))
        x = torch.linspace(-1, 1, 7)
        plain = x.clone().requires_grad_()
        torch.exp(torch.tanh(costly(torch.cos(plain * 1)))).sum().backward()
        counts = []
        for _ in range(3):
            leaf = x.clone().requires_grad_()
            before, packed[:] = runs[0], []
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                y = run(leaf * 1).sum()
            y.backward()
            counts.append((runs[0] - before, len(packed)))
            assert_same(leaf.grad, plain.grad)
        assert [count for count, _ in counts] == [2, 1, 1]
        assert counts[1][1] > counts[0][1]

    def test_torch_checkpoint_around(self, compare):
        def scenario(region):
            inner = region(lambda x: torch.sin(torch.tanh(torch.cos(x))))

            def fn(x):
                return torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(inner(torch.cos(x))), x, use_reentrant=False)

            return _of(fn)(lambda fn: fn)

        compare(scenario, everything, steps=4)


class TestErrors:
    """Errors are raised at once, and leave nothing behind."""

    @pytest.mark.parametrize("answer", [None, "keep", True, Decision.OFFLOAD])
    def test_no_decision(self, answer):
        class Wrong:
            def decide(self, site):
                return answer

            def __repr__(self):
                return "Wrong()"

        with pytest.raises(InvalidInputError, match=r"for .*sin .*Wrong\(\) returned"):
            checkpoint(torch.sin, policy=Wrong())(torch.ones(3, requires_grad=True))

    def test_no_policy(self):
        with pytest.raises(InvalidInputError, match="needs a method decide"):
            checkpoint(torch.sin, policy="everything")

    def test_an_error_in_the_region(self, runs):
        broken = [False]

        class Part(nn.Module):
            def forward(self, x):
                y = costly(torch.cos(x))
                if broken[0]:
                    raise KeyError("no")
                return y

        class Whole(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = Part()

            def forward(self, x):
                return torch.exp(torch.tanh(self.part(x)))

        whole = Whole()
        run = checkpoint(whole, policy=Choose(lambda site: costly_calls(site) or isinstance(site.function, Part)))
        grads = []
        for turn in range(5):
            broken[0] = turn in (1, 3)
            x = torch.ones(3, requires_grad=True)
            if broken[0]:
                with pytest.raises(KeyError):
                    run(x * 1)
            else:
                run(x * 1).sum().backward()
                grads.append(x.grad)
            assert "forward" not in whole.part.__dict__
            assert not torch.overrides._get_current_function_mode_stack()
        assert_same(grads[1:], [grads[0]] * 2)


class _Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.sin(self.linear(torch.cos(x)))


class _Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = _Part()

    def forward(self, x):
        return torch.exp(torch.tanh(self.part(x)))


def _gradient(call, value):
    leaf = value.clone().requires_grad_()
    return torch.autograd.grad(call(leaf * 1).sum(), leaf)[0]


def test_threads():
    whole, inputs = _Whole(), [torch.randn(3, 4) for _ in range(8)]
    run = checkpoint(whole, policy=Choose(module(_Part)))
    expected = [_gradient(whole, value) for value in inputs]
    _gradient(run, inputs[0])
    found = [[] for _ in inputs]

    def work(index):
        for _ in range(20):
            found[index].append(_gradient(run, inputs[index]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, grads in zip(expected, found, strict=True):
        assert_same(grads, [one] * 20)
    assert "forward" not in whole.part.__dict__


def test_values_are_checked_where_asked_for(runs):
    run = checkpoint(lambda x: torch.exp(torch.tanh(costly(torch.cos(x)))), policy=Choose(costly_calls), check_values=True)
    for _ in range(2):
        before = runs[0]
        run(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert runs[0] - before == 2


def test_a_name_changes_nothing_and_chooses_what_is_kept(runs):
    def fn(x):
        y = lowtide.name(costly(torch.cos(x)), "first").view(-1)
        return torch.exp(torch.tanh(costly(torch.sin(y))))

    policy = Choose(lambda site: site.name == "first")
    run = checkpoint(fn, policy=policy)
    for _ in range(2):
        before = runs[0]
        run(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert runs[0] - before == 3
    x = torch.ones(2)
    assert lowtide.name(x, "x") is x


def test_what_is_kept_can_be_asked_for():
    block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    handle = install([("blocks.0", block)], policy=Choose(lambda site: site.level == "function" and site.module == "blocks.0.2"))
    for _ in range(2):
        handle.modules()[0](torch.randn(3, 4, requires_grad=True)).sum().backward()
    (site,) = kept_sites(handle)
    assert (site.module, site.index, site.output_bytes, site.shapes) == ("blocks.0.2", 1, 3 * 4 * 4, ((3, 4),))
    assert site.module_types == (nn.Sequential, nn.Linear)
    assert (site.region, site.ops) == ("blocks.0", (torch.ops.aten.addmm.default,))
    assert any("keeps it: 48 bytes" in guard.why for guard in lowtide.explain(block))
    handle.remove()
    assert "forward" not in block.__dict__


def test_segments_keep_too(runs):
    class Part(nn.Module):
        def forward(self, x):
            return torch.tanh(costly(torch.cos(x)))

    members = [(str(i), Part()) for i in range(3)]
    handle = install(members, policy=Choose(costly_calls))

    def step():
        x = torch.linspace(-1, 1, 5).requires_grad_()
        h = x * 1
        for _, part in members:
            h = part(h)
        h.sum().backward()
        return x.grad

    found = [step() for _ in range(3)]
    before = runs[0]
    found.append(step())
    assert runs[0] - before == 3
    handle.remove()
    assert_same(found, [step()] * 4)
