"""The first step shows whether a policy says anything: what matched nothing is an error that names it."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import AlreadyAppliedError, InvalidInputError, PolicyError
from lowtide.policy import anything, by, first_of, full, inside, keep, module, named, one_in, op, recompute, shape, size
from lowtide.records import Decision

from ._models import Attention, Block, Stack, SwiGLU, inputs, llama


def step(model):
    model(inputs()).backward()


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (keep(op("aten.addmm")), r"keep\(op\('aten.addmm'\)\) matched nothing in the first step.*aten.mm"),
        (keep(op(F.gelu)), r"op\(F.gelu\)\) matched nothing in the first step.*silu"),
        (keep(named("mixd")), r"named\('mixd'\)\) matched nothing in the first step: did you mean mixed"),
        (keep(size(at_least="1GiB")), "matched nothing in the first step: there was .* B"),
        (keep(shape(3, 3)), r"shape\(3, 3\)\) matched nothing in the first step.*\(2, 5, 8\)"),
        (keep(op("aten.mm"), op("aten.bmm")), r"keep\(op\('aten.bmm'\)\) matched nothing"),
        (first_of(keep(anything()), recompute(op("aten.bmm"))), r"recompute\(op\('aten.bmm'\)\) matched nothing"),
        (keep(inside("**.attention") & op("aten.silu")), "aten.silu.* matched nothing in the first step"),
    ],
    ids=repr,
)
def test_a_rule_that_matched_nothing_is_named(rule, says):
    model = llama()
    handle = lowtide.apply(model, rule)
    with pytest.raises(PolicyError, match=says):
        step(model)
    assert handle.regions == ()
    step(model)
    lowtide.apply(model, "full")


def test_a_policy_that_says_nothing_sensible_is_taken_out_again():
    model = llama()
    lowtide.apply(model, by(lambda site: "keep"))
    with pytest.raises(PolicyError):
        step(model)
    lowtide.apply(model, "full")
    step(model)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (keep(module("blocks.*.atention")), "does not have: did you mean .*attention"),
        (recompute(inside("**.mlq")), "does not have: did you mean .*mlp"),
        (keep(module(nn.Conv2d)), "does not have"),
        (keep(inside("**.wz") & op("aten.mm")), "does not have: did you mean w"),
    ],
    ids=repr,
)
def test_modules_that_are_not_there_are_refused_at_once(rule, says):
    model = llama()
    with pytest.raises(PolicyError, match=says):
        lowtide.apply(model, rule)
    assert all("forward" not in vars(part) for part in model.modules())


def test_a_rule_has_to_match_in_one_region_only():
    model = Stack(Block(), Block(inner=SwiGLU, name="other"))
    handle = lowtide.apply(model, keep(inside("blocks.1.other") & op("aten.silu")))
    for _ in range(3):
        step(model)
    handle.remove()


def test_a_rule_is_shadowed_without_error():
    model = llama()
    lowtide.apply(model, first_of(keep(op("aten.mm")), recompute(inside("**.wq"))))
    for _ in range(3):
        step(model)


class Skipping(Stack):
    last = False

    def forward(self, x):
        for block in list(self.blocks)[: None if self.last else -1]:
            x = block(x)
        return x.square().mean()


def test_a_rule_may_be_about_regions_that_have_not_run():
    model = Skipping(Block(), Block(), Block(inner=SwiGLU, name="other"))
    lowtide.apply(model, keep(op("aten.mm") & inside("**.other")))
    step(model)
    with pytest.warns(UserWarning, match=r"matched nothing so far, and some regions have not run yet: 'blocks.2'"):
        step(model)
    model.last = True
    for _ in range(2):
        step(model)


def test_nothing_is_told_of_a_step_that_broke_off_or_loops():
    model = Skipping(Block(), Block(inner=SwiGLU, name="other"), Block(inner=SwiGLU, name="other"))
    lowtide.apply(model, keep(op("aten.mm") & inside("blocks.2.other")))
    for _ in range(2):
        model.blocks[0](model.blocks[0](inputs().requires_grad_()))
    model.last = True
    step(model)


def test_it_is_an_error_once_they_have_run():
    model = Skipping(Block(), Block(), Block())
    lowtide.apply(model, keep(op("aten.bmm")))
    step(model)
    with pytest.warns(UserWarning, match="not run yet"):
        step(model)
    model.last = True
    with pytest.raises(PolicyError, match=r"aten\.bmm"):
        step(model)


def test_without_gradients_nothing_is_judged():
    model = llama()
    lowtide.apply(model, keep(op("aten.bmm")))
    with torch.no_grad():
        for _ in range(3):
            model(inputs())


def test_regions_by_hand_are_judged_as_well():
    block = lowtide.checkpoint(Block(), policy=keep(op("aten.bmm")))
    with pytest.raises(PolicyError, match=r"op\('aten.bmm'\)\) matched nothing in the first step"):
        block(inputs().requires_grad_()).sum().backward()


@pytest.mark.parametrize("answer", [None, False, "keep", Decision.OFFLOAD])
def test_a_function_that_returns_no_decision_is_refused_at_once(answer):
    model = llama()
    lowtide.apply(model, lambda site: answer)
    with pytest.raises(PolicyError, match=r"lambda.* returned"):
        model(inputs())


def test_what_a_function_raises_goes_to_the_user():
    def asks(site):
        raise KeyError("mine")

    model = llama()
    handle = lowtide.apply(model, asks)
    with pytest.raises(KeyError, match="mine"):
        model(inputs())
    handle.remove()
    step(model)


def keeps_products(site):
    return Decision.KEEP if site.function is F.linear else Decision.RECOMPUTE


@pytest.mark.parametrize("policy", ["selective", keeps_products, by(keeps_products), one_in(2, keep(op("F.linear")))])
def test_checkpoint_takes_policies_in_every_form(policy):
    torch.manual_seed(0)
    plain, block = Block(), Block()
    block.load_state_dict(plain.state_dict())
    region = lowtide.checkpoint(block, policy=policy)
    for _ in range(3):
        x = inputs().requires_grad_() * 1
        plain(x).sum().backward(retain_graph=True)
        region(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), block.parameters(), strict=True))

    @lowtide.checkpoint(policy=policy)
    def run(x):
        return F.linear(F.scaled_dot_product_attention(x, x, x), x[0]).relu()

    for _ in range(2):
        run(inputs().requires_grad_()).sum().backward()


def test_a_policy_that_needs_a_trace_says_so():
    for policy in ("plan:50%", "cheap"):
        with pytest.raises(InvalidInputError, match="is made from a trace"):
            lowtide.apply(llama(), policy)
    for wrong in (3, None, op("aten.mm")):
        with pytest.raises(InvalidInputError, match="no policy"):
            lowtide.apply(llama(), wrong)


def test_applying_twice_is_refused_though_the_regions_differ():
    model = llama()
    handle = lowtide.apply(model, "every:2")
    with pytest.raises(AlreadyAppliedError, match=r"'blocks\.0'"):
        lowtide.apply(model, lowtide.policy.only(last=1))
    assert handle.regions == ("blocks.0",)
    handle.remove()
    lowtide.apply(model, "every:2")


def test_a_shared_module_is_one_region():
    shared = Block()
    model = Stack(shared, shared, shared)
    handle = lowtide.apply(model, full())
    assert handle.regions == ("blocks.0",)
    step(model)
    assert handle.replay_seconds() > 0


def test_nothing_of_the_tree_changes():
    model = llama()
    before = [(path, type(part)) for path, part in model.named_modules()], list(model.state_dict())
    handle = lowtide.apply(model, "selective")
    for _ in range(2):
        step(model)
    assert ([(path, type(part)) for path, part in model.named_modules()], list(model.state_dict())) == before
    assert isinstance(model.blocks[0], Block)
    handle.remove()
    assert all("forward" not in vars(part) for part in model.modules())


def test_copies_and_pickles_have_the_policy_too():
    model = llama()
    lowtide.apply(model, keep(op("aten.mm")))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(2):
            step(twin)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(twin)


def test_what_is_inside_a_region_is_seen_by_its_path_from_the_model():
    seen = []

    def note(site):
        seen.append((site.module, site.module_types[-1]))
        return Decision.RECOMPUTE

    model = llama()
    lowtide.apply(model, note)
    step(model)
    assert ("blocks.1.attention.wq", nn.Linear) in seen
    assert ("blocks.1.attention", Attention) in seen
    assert ("blocks.0", Block) in seen


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(nn.functional.relu_(self.linear(x))).exp()


def test_an_op_in_place_that_a_rule_would_keep_is_named_with_the_way_out():
    run = lowtide.checkpoint(InPlace(), policy=keep(op(torch.relu_)))
    loss = run(torch.randn(3, 4)).sum()
    with pytest.raises(PolicyError, match=r"relu_ in .* works in place: .* Call the form that makes a tensor of its own"):
        loss.backward()


def _through(x, module):
    return torch.exp(torch.tanh(module(x))).sin()


_MADE_ANEW = {
    "module": lambda linear, policy: lowtide.checkpoint(linear, policy=policy),
    "function": lambda linear, policy: functools.partial(lowtide.checkpoint(_through, policy=policy), module=linear),
    "partial": lambda linear, policy: lowtide.checkpoint(functools.partial(_through, module=linear), policy=policy),
}


@pytest.mark.parametrize("form", _MADE_ANEW)
def test_a_region_made_anew_in_every_step_goes_by_what_was_decided_in_the_first(form):
    layer, asked = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.GELU()), bytearray()

    def rule(site):
        asked.append(1)
        return Decision.KEEP if site.level == "function" else Decision.RECOMPUTE

    counts = []
    for _ in range(4):
        _MADE_ANEW[form](layer, by(rule))(torch.randn(3, 4)).sum().backward()
        counts.append(len(asked))
    assert counts[0] > 0
    assert counts[1:] == counts[:1] * 3


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        base = lowtide.name(self.linear(x), "base")
        return torch.exp(torch.tanh(lowtide.name(base.view(2, 6), "view"))).sin()


@pytest.mark.parametrize("name", ["base", "view"])
def test_a_view_may_have_a_name_of_its_own(name):
    run = lowtide.checkpoint(Views(), policy=keep(named(name)))
    run(torch.randn(3, 4)).sum().backward()
    assert [site.names for site in lowtide.engine.kept_sites(run)] == [("base", "view")]
