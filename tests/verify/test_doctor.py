"""Each symptom in a model that was built to show it, and not a word about the same model without it."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_debug_enabled
from torch.utils.data import DataLoader

import lowtide
from lowtide.verify.doctor import _slow
from lowtide.verify.doctor._examination import Examination
from lowtide.verify.doctor._look import look
from lowtide.workloads import bundled

ACTIVATIONS = {"blocks": 3, "width": 32, "heads": 2, "context": 32, "batch": 16, "corpus_bytes": 2**16}


LOG: list[int] = []


def held_up(trace, op):
    """The trace of a run in which some ops of this file took a second, and all others next to nothing."""
    slow = [o.name.startswith(op) and "test_doctor.py" in (o.source or "") for o in trace.ops]
    return replace(trace, ops=tuple(replace(o, seconds=1.0 if is_slow else 1e-5) for o, is_slow in zip(trace.ops, slow, strict=True)))


def by_torch(block, *args, **options):
    return checkpoint(block, *args, **{"use_reentrant": False, **options})


def symptoms(model, step, **options):
    found = lowtide.doctor(model, step, **options)
    assert all(f.what and f.evidence and f.mend for f in found.findings)
    return {f.symptom: f for f in found.findings}


class Wide(nn.Module):
    """Blocks whose activations are most of the peak; ``whole`` and ``call`` say how it is run."""

    def __init__(self, call=lambda block, x: block(x), parts="", vocabulary=0):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16) if vocabulary else None
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, vocabulary) if vocabulary else nn.Identity()
        self.call, self.parts = call, parts

    def body(self, x):
        for block in self.blocks:
            for part in block if self.parts == "leaves" else (block,):
                x = self.call(part, x)
        return x

    def forward(self, x):
        body = self.body if self.parts != "whole" else lambda x: by_torch(self.body, x)
        return self.head(body(x if self.embedding is None else self.embedding(x)))


def wide(batch=512, **options):
    model = Wide(**options)
    x = torch.randn(batch, 16)

    def step():
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return model, step


ill_and_well = pytest.mark.parametrize("ill", [True, False], ids=["ill", "well"])


def found_if(ill, symptom, model, step, **options):
    """The finding of a model that is ill: the only one. None where it is well, with which nothing is wrong."""
    found = symptoms(model, step, **options)
    assert set(found) == ({symptom} if ill else set())
    return found.get(symptom)


def mended_by_substitution(finding, model, step):
    """Where that is what mends a finding, it does."""
    with lowtide.torch_compat.substituted():
        return finding is None or ("substituted()" in finding.mend and symptoms(model, step) == {})


@pytest.fixture
def one_process(tmp_path):
    """A group of this process alone; what is yielded is ``torch.distributed``."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("policy", [None, "full"])
def test_healthy_workloads(policy):
    workload = bundled("gpt", **ACTIVATIONS)
    assert symptoms(workload.model, workload.step, policy=policy) == {}


@pytest.mark.parametrize(("name", "sizes"), [("resnet", {"batch": 16, "widths": (8, 16), "depths": (2, 2)}), ("unet", {"batch": 2})])
def test_healthy_workloads_under_batch_norm_and_skips(name, sizes):
    workload = bundled(name, **sizes)
    assert symptoms(workload.model, workload.step, policy="full" if name == "resnet" else None) == {}


def test_healthy_calls_of_torch_checkpoint():
    assert symptoms(*wide(call=by_torch), limit_bytes=2**40) == {}


class Mixture(nn.Module):
    """Each row goes through the expert that a router chooses."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(1)
        chosen, out = weights.argmax(1), x
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return out


def frozen_but_for_scales(model):
    """Low-rank adapters and the like: the regions' inputs need no gradients, nor do most weights."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.scale = nn.Parameter(torch.zeros(16))
        block.register_forward_hook(lambda block, _, result: result * (1 + block.scale))


@pytest.mark.parametrize("kind", ["mixture of experts", "adapters", "autocast", "loader", "regions in regions"])
def test_healthy_training_of_other_kinds(kind):
    model, _ = wide(call=by_torch)
    if kind == "mixture of experts":
        model.blocks = nn.ModuleList(Mixture() for _ in range(3))
    if kind == "adapters":
        frozen_but_for_scales(model)
    if kind == "regions in regions":
        model.call = lambda block, x: by_torch(lambda y: by_torch(block[2:], block[:2](y)), x)
    batches = iter(DataLoader(torch.randn(1024, 16), batch_size=512, shuffle=True))  # no more than one run draws

    def step():
        x = next(batches) if kind == "loader" else torch.ones(512, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = model(x).float().square().mean()
        loss.backward()
        model.zero_grad()

    assert symptoms(model, step) == {}


class TopKRouter(nn.Module):
    """Its name is what is looked for."""


def language_step(model, tokens, optimizer=None):
    """Predicts the tokens themselves."""

    def step():
        model.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return step


class TestMemory:
    def test_one_region_over_everything(self):
        assert set(symptoms(*wide(parts="whole"))) == {"one region over everything"}

    def test_regions_too_small(self):
        finding = found_if(True, "regions too small", *wide(call=by_torch, parts="leaves"))
        assert finding.what.startswith("16 regions free ")
        assert "lowtide.apply" in finding.mend

    def test_the_peak_is_parameters_and_the_sequence_too_short(self):
        """From the length on that it names the step is healthy; of half that length it is not."""

        def examined(length):
            model = Wide(call=by_torch, vocabulary=4096)
            model.head, tokens = nn.Identity(), torch.randint(4096, (1, length))

            def step():
                model.zero_grad()
                model(tokens).square().mean().backward()

            return symptoms(model, step)

        ill = examined(4)
        assert set(ill) == {"the peak is parameters, gradients and optimizer state", "sequence too short"}
        assert "fully_shard" in ill["the peak is parameters, gradients and optimizer state"].mend
        length = int(ill["sequence too short"].mend.split()[-2])
        assert "sequence too short" in examined(length // 2)
        assert examined(length) == {}

    def test_at_no_length_is_a_sequence_long_enough_where_regions_free_next_to_nothing(self):
        model = Wide(call=by_torch, vocabulary=4096)
        model.blocks = model.blocks[:1]
        tokens = torch.randint(4096, (1, 4))

        def step():
            model.zero_grad()
            model(tokens).square().mean().backward()

        found_if(True, "the peak is parameters, gradients and optimizer state", model, step)

    @ill_and_well
    def test_the_peak_is_the_optimizer(self, ill):
        model = Wide(call=by_torch)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        x = torch.randn(4 if ill else 1024, 16)

        def step():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found_if(ill, "the peak is optimizer", model, step)

    @ill_and_well
    def test_the_peak_is_logits(self, ill):
        vocabulary = 1024 if ill else 16
        model = Wide(call=by_torch, vocabulary=vocabulary)
        tokens = torch.randint(vocabulary, (8, 64))
        finding = found_if(ill, "the peak is logits", model, language_step(model, tokens))
        assert not ill or "chunks" in finding.mend

    @ill_and_well
    def test_the_peak_is_temporaries(self, ill):
        model, _ = wide(call=by_torch)
        x = torch.randn(256, 16)

        def step():
            model.zero_grad()
            loss = model(x).square().mean()
            with torch.no_grad():
                torch.randn(2_000_000 if ill else 20).sin()
            loss.backward()
            return loss.detach()

        found_if(ill, "the peak is temporaries", model, step)

    @ill_and_well
    def test_the_peak_is_a_communication_buffer(self, one_process, ill):
        model, _ = wide(call=by_torch)

        def step():
            loss = model(torch.randn(64, 16)).square().mean()
            one_process.all_reduce(torch.zeros(500_000 if ill else 50))
            loss.backward()
            model.zero_grad()

        found_if(ill, "the peak is a communication buffer", model, step)

    @ill_and_well
    def test_fused_attention(self, ill):
        class Attention(nn.Module):
            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(q, k, v)

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention, self.project, self.up = Attention(), nn.Linear(16, 48), nn.Linear(16, 128)

            def forward(self, y):
                q, k, v = self.project(y).chunk(3, dim=-1)
                attended = by_torch(self.attention, q, k, v) if ill else self.attention(q, k, v)
                return y + attended * torch.tanh(self.up(y)).sum(-1, keepdim=True)

        model = nn.Sequential(*(Block() for _ in range(6)))
        x = torch.randn(4, 2, 128, 16)

        def step():
            y = x
            for block in model:
                y = block(y) if ill else by_torch(block, y)
            y.sum().backward()
            model.zero_grad()

        found_if(ill, "fused attention", model, step)


class TestGradients:
    @ill_and_well
    def test_random_state(self, ill):
        call = lambda block, x: by_torch(lambda y: F.dropout(block(y)), x, preserve_rng_state=not ill)  # noqa: E731
        finding = found_if(ill, "other gradients: random state", *wide(call=call))
        assert not ill or finding.mend == "preserve_rng_state=True"

    @ill_and_well
    def test_buffers(self, ill):
        norm = nn.BatchNorm1d(64) if ill else nn.LayerNorm(64)
        model = nn.Sequential(nn.Linear(16, 64), norm, nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

        def step():
            h = by_torch(model[:3], torch.randn(512, 16, requires_grad=True))
            by_torch(model[3:], h).square().mean().backward()
            model.zero_grad()

        finding = found_if(ill, "other gradients: buffers", model, step)
        assert not ill or "num_batches_tracked" in finding.evidence
        assert mended_by_substitution(finding, model, step)

    @ill_and_well
    def test_side_effects(self, net, ill):
        def grows(_, h):
            if ill:
                LOG.append(1)
            return torch.sin(h * (len(LOG) + 1))

        finding = found_if(ill, "other gradients: side effects", *net(grows, call=by_torch, batch=512))
        assert not ill or "LOG" in finding.what

    @ill_and_well
    def test_an_attribute_that_each_replay_changes(self, net, ill):
        def counts(block, h):
            block.calls = getattr(block, "calls", 0) + ill
            return torch.sin(h * (1 + block.calls))

        model, step = net(counts, call=by_torch, batch=512)
        finding = found_if(ill, "other gradients: side effects", model, step)
        assert not ill or "calls is changed, which torch.utils.checkpoint does not put back" in finding.what
        model.call = lambda block, x: lowtide.checkpoint(block)(x)
        assert not ill or ("lowtide.checkpoint" in finding.mend and symptoms(model, step) == {})

    @ill_and_well
    def test_no_cause_that_is_known(self, net, ill):
        def halves(_, h):
            return torch.sin(h * (0.5 if ill and torch._C._current_graph_task_id() != -1 else 1.0))

        finding = found_if(ill, "other gradients", *net(halves, call=by_torch, batch=512))
        assert not ill or "aten.mul" in finding.evidence


class TestSlow:
    @pytest.mark.parametrize("everywhere", [True, False])
    def test_debug(self, everywhere):
        with set_checkpoint_debug_enabled(True) if everywhere else contextlib.nullcontext():
            found = symptoms(*wide(call=lambda block, x: by_torch(block, x, **({} if everywhere else {"debug": True}))))
        assert set(found) == {"debug is on"}
        assert ("set_checkpoint_debug_enabled" in found["debug is on"].what) is everywhere

    @ill_and_well
    def test_replayed_more_than_once(self, ill):
        model, _ = wide()

        def step():
            y = torch.randn(512, 16)
            for block in model.blocks:
                y = by_torch(block, y)
            if ill:
                y.sum().backward(retain_graph=True)
                y.square().sum().backward()
            else:
                (y.sum() + y.square().sum()).backward()
            model.zero_grad()

        finding = found_if(ill, "replayed more than once", model, step)
        assert not ill or "4 calls" in finding.evidence or "1 calls, 2 replays" in finding.evidence

    def test_double_wrapping(self):
        found = symptoms(*wide(call=lambda block, x: by_torch(lambda y: by_torch(block, y), x)))
        assert set(found) == {"double wrapping"}
        model, step = wide(call=by_torch)
        assert "lowtide" in symptoms(model, step, policy="full")["double wrapping"].what

    def test_double_wrapping_with_torchs_region_inside(self):
        model, step = wide()
        for block in model.blocks:
            block.forward = functools.partial(by_torch, block.forward)
        found = symptoms(model, step, policy="full")
        assert set(found) == {"double wrapping"}
        assert "torch.utils.checkpoint inside" in found["double wrapping"].what

    @ill_and_well
    def test_an_expensive_op(self, net, ill):
        many = torch.randn(1_000_000 if ill else 3)

        def ranked(_, h):
            return h * many.kthvalue(len(many) // 2).values

        found = symptoms(*net(ranked, call=by_torch, batch=512))
        assert set(found) == ({"an expensive op is replayed", "the peak is temporaries"} if ill else set())
        assert not ill or "aten.kthvalue" in found["an expensive op is replayed"].what

    @ill_and_well
    def test_regions_too_long(self, net, ill):
        def long(_, h):
            for _ in range(200 if ill else 1):
                h = torch.sin(h)
            return h

        finding = found_if(ill, "regions too long", *net(long, call=by_torch, batch=512))
        assert not ill or "'blocks.2'" in finding.what

    @pytest.mark.parametrize("times", [1, 2])
    @pytest.mark.parametrize(
        ("symptom", "op"), [("an expensive op is replayed", "aten.sum"), ("regions too long", "aten."), ("regions too long", "aten.mul")]
    )
    def test_what_one_run_took_long_for_is_no_symptom(self, net, symptom, op, times):
        """Another program that wants the core for a while does not want it at the same op of the other run."""
        model, step = net(lambda _, h: h * h.sum(1, keepdim=True).square(), call=by_torch, batch=512)
        trace = lowtide.trace(model, step)
        slowed = [held_up(trace, op), held_up(trace, op if times == 2 else "none")]
        exam = Examination(model, step, look(model, step), None, *slowed)
        assert [finding.symptom for finding in _slow.find(exam)] == [symptom][: times - 1]

    @ill_and_well
    def test_a_collective(self, net, one_process, ill):
        def reduces(_, h):
            total = h.detach().sum()
            if ill:
                one_process.all_reduce(total)
            return h * total

        found = symptoms(*net(reduces, call=by_torch, batch=512))
        assert found.keys() - {"regions too long"} == ({"a collective is replayed"} if ill else set())
        assert not ill or "c10d.allreduce_" in found["a collective is replayed"].what


class TestMismatch:
    @ill_and_well
    def test_cache_on(self, net, ill):
        def appends(block, h):
            if block.use_cache:
                block.cache.append(h.detach())
            return h * torch.sin(h[None] * torch.stack([h, *block.cache])).sum(0)

        model, step = net(appends, call=by_torch, batch=512)
        model.blocks[2].cache, model.blocks[2].use_cache = [], ill
        finding = found_if(ill, "mismatch: cache on", model, step)
        assert not ill or "use_cache" in finding.what

    @ill_and_well
    def test_mode_flipped(self, ill):
        model, _ = wide(call=by_torch)
        model.blocks[1].append(nn.Dropout(0.5))

        def step():
            model.train()
            loss = model(torch.randn(512, 16)).sum()
            model.train(not ill)
            loss.backward()
            model.zero_grad()

        finding = found_if(ill, "mismatch: mode flipped", model, step)
        assert not ill or "blocks." in finding.what

    @ill_and_well
    def test_dtype_context(self, net, ill):
        def default(_, h):
            return torch.sin(h * torch.ones(16) * 1.0)

        model, _ = net(default, call=by_torch)

        def step():
            loss = model(torch.randn(512, 8)).sum()
            torch.set_default_dtype(torch.float64 if ill else torch.float32)
            try:
                loss.backward()
            finally:
                torch.set_default_dtype(torch.float32)
            model.zero_grad()

        finding = found_if(ill, "mismatch: dtype context", model, step)
        assert not ill or "float64" in finding.what
        assert mended_by_substitution(finding, model, step)

    @ill_and_well
    def test_another_dtype_within_the_replay(self, net, ill):
        def wide(_, h):
            return torch.sin(h.double() if ill and torch._C._current_graph_task_id() != -1 else h).float()

        finding = found_if(ill, "mismatch: dtype context", *net(wide, call=by_torch, batch=512))
        assert not ill or "torch.float64" in finding.evidence

    @pytest.mark.parametrize("seen_by", ["op", "name", ""])
    def test_routing(self, net, seen_by):
        """By an op that chooses among those that differ; else by the name of a class."""
        flips = []

        def router(_, h):
            flips.append(1)
            chosen = 2 + len(flips) % 2 if seen_by else 2
            picked = h[torch.topk(h.sum(1), chosen).indices] if seen_by == "op" else h[:chosen]
            return h * torch.sin(picked).sum()

        model, step = net(router, call=by_torch, batch=512)
        if seen_by == "name":
            model.blocks[2].gate = TopKRouter()
        finding = found_if(bool(seen_by), "mismatch: routing", model, step)
        assert not seen_by or "router" in finding.mend

    def test_another_mismatch_is_not_blamed_on_a_cache(self, net):
        def cuts(_, h):
            return torch.sin(h[:3]) if torch._C._current_graph_task_id() != -1 else torch.sin(h)

        model, step = net(cuts, call=by_torch)
        model.use_cache = True
        found = symptoms(model, step)
        assert set(found) == {"mismatch"}
        assert "first op that differs: aten.sin" in found["mismatch"].evidence

    @ill_and_well
    def test_an_error_of_no_kind_that_is_known(self, net, ill):
        def fails(_, h):
            if ill and torch._C._current_graph_task_id() != -1:
                raise ValueError("only in a replay")
            return torch.sin(h)

        finding = found_if(ill, "fails with checkpointing", *net(fails, call=by_torch, batch=512))
        assert not ill or "ValueError: only in a replay" in finding.evidence


class TestReentrant:
    @ill_and_well
    def test_frozen_inputs(self, ill):
        call = lambda block, x: by_torch(block, x.detach() if ill else x, use_reentrant=True)  # noqa: E731
        model, _ = wide(call=call)

        def step():
            model(torch.randn(512, 16, requires_grad=True)).square().mean().add(model.blocks[0][0].bias.sum()).backward()
            model.zero_grad()

        found = symptoms(model, step)
        assert ("reentrant, frozen inputs" in found) is ill
        assert found["reentrant, frozen inputs"].mend.startswith("use_reentrant=False") if ill else found == {}

    @ill_and_well
    def test_grad(self, ill):
        model, _ = wide(call=lambda block, x: by_torch(block, x, use_reentrant=ill))

        def step():
            torch.autograd.grad(model(torch.randn(512, 16, requires_grad=True)).sum(), list(model.parameters()))

        found_if(ill, "reentrant, torch.autograd.grad", model, step)

    @ill_and_well
    def test_ddp(self, one_process, ill):
        inner, _ = wide(call=lambda block, x: by_torch(block, x, use_reentrant=ill))
        model = nn.parallel.DistributedDataParallel(inner, find_unused_parameters=True)

        def step():
            model(torch.randn(512, 16, requires_grad=True)).sum().backward()
            model.zero_grad()

        found_if(ill, "reentrant, DistributedDataParallel", model, step)

    @ill_and_well
    def test_custom_backward(self, net, ill):
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                if ill:
                    (x,) = ctx.saved_tensors
                return grad * 2 + 0 * x

        model, step = net(lambda _, h: Twice.apply(h), call=by_torch, batch=512)
        finding = found_if(ill, "custom backward fails", model, step)
        assert not ill or "test_doctor.py:" in finding.what
        model.call = lambda block, x: lowtide.checkpoint(block)(x)
        assert not ill or ("lowtide.checkpoint" in finding.mend and symptoms(model, step) == {})


class TestRest:
    @ill_and_well
    def test_still_out_of_memory(self, ill):
        model, step = wide(call=by_torch)
        finding = found_if(ill, "still out of memory", model, step, limit_bytes=100_000 if ill else 10_000_000)
        assert not ill or "in forward" in finding.what or "in backward" in finding.what

    @pytest.mark.parametrize("mode", ["eval", "ignored", "followed"])
    def test_a_flag_that_does_nothing(self, mode):
        model, step = wide(call=lambda block, x: by_torch(block, x) if model.training and mode != "ignored" else block(x))
        model.gradient_checkpointing = True
        model.train(mode != "eval")
        expected = {"eval": {"checkpointing in eval()"}, "ignored": {"a flag that is ignored"}, "followed": set()}
        assert set(symptoms(model, step)) == expected[mode]

    @ill_and_well
    @pytest.mark.parametrize("library", ["lowtide", "torch"])
    def test_regions_without_gradients(self, library, ill):
        model, _ = wide() if library == "lowtide" else wide(call=by_torch)
        handle = lowtide.apply(model, "full" if library == "lowtide" else "none")

        def step():
            with torch.set_grad_enabled(not ill):
                y = model(torch.randn(512, 16))
            model.blocks[0][0].weight.sum().add(y.sum()).backward()
            model.zero_grad()

        found_if(ill, "no region ran" if library == "lowtide" else "no gradients are recorded", model, step)
        handle.remove()

    def test_an_error_of_the_step_itself_is_no_symptom(self):
        def step():
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            lowtide.doctor(nn.Linear(2, 2), step)

    def test_errors_come_first(self):
        found = lowtide.doctor(*wide(call=lambda block, x: by_torch(block, x.detach(), use_reentrant=True, debug=False)))
        assert found.errors == found.findings[: len(found.errors)]
        assert found.report().startswith("error: ")
