"""Rules and what combines them: values that decide call by call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.errors import InvalidInputError, PolicyError
from lowtide.policy import (
    anything,
    both,
    by,
    by_layer_type,
    every,
    first_of,
    full,
    inside,
    keep,
    limit_bytes,
    megatron_selective,
    module,
    named,
    one_in,
    only,
    op,
    policy_from_json,
    recompute,
    segments,
    selective,
    shape,
    size,
    skip_last,
    sqrt,
    torchtitan,
)
from lowtide.policy._ledger import Decider
from lowtide.records import Decision

from ._sites import aten, decisions, site

MM = site(torch.mm, aten.mm.default, output_bytes=100)
RELU = site(torch.relu, aten.relu.default, output_bytes=60)
GATE = site(torch.mm, aten.mm.default, module="layers.0.gate")


def large(call):
    return Decision.KEEP if call.output_bytes > 80 else Decision.RECOMPUTE


def said(policy, *sites):
    return "".join(decisions(policy, list(sites)))


def test_what_no_rule_speaks_of_is_recomputed():
    assert said(keep(op("aten.mm")), MM, RELU) == "kr"
    assert said(recompute(op("aten.mm")), MM, RELU) == "rr"


def test_the_first_that_speaks_decides():
    assert said(first_of(recompute(inside("**.gate")), keep(op("aten.mm"))), MM, GATE, RELU) == "krr"
    assert said(first_of(keep(op("aten.mm")), recompute(inside("**.gate"))), MM, GATE, RELU) == "kkr"


def test_both_have_to_keep():
    assert said(both(keep(anything()), keep(size(at_least=80))), MM, RELU) == "kr"


def test_a_function_decides():
    assert said(by(large), MM, RELU) == "kr"
    assert said(first_of(keep(op("aten.relu")), large), MM, RELU, GATE) == "kkr"


def test_bytes_are_limited_in_each_call_of_a_region():
    policy = limit_bytes(keep(anything()), 200)
    assert said(policy, MM, RELU, MM, RELU) == "kkrr"
    decider = Decider(policy)
    calls = [site(output_bytes=150, position=0), site(output_bytes=150, position=1)]
    assert [decider.decide(call).value for call in calls * 2] == ["keep", "recompute"] * 2
    assert said(limit_bytes(keep(anything()), "1KiB"), MM, RELU) == "kk"


def test_one_in_so_many_is_kept():
    assert said(one_in(2, keep(op("aten.mm"))), MM, RELU, MM, MM) == "krrk"
    assert said(one_in(3, keep(op("aten.mm"))), *[MM] * 7) == "krrkrrk"
    assert said(one_in(1, keep(op("aten.mm"))), MM, MM) == "kk"


def test_equal_rules_in_two_places_count_apart():
    assert said(first_of(one_in(2, keep(op("aten.mm"))), one_in(2, keep(op("aten.relu")))), MM, RELU, MM, RELU, RELU) == "kkrrk"


@pytest.mark.parametrize("answer", [None, True, "keep", Decision.OFFLOAD, 1])
def test_what_is_no_decision_is_refused_at_once(answer):
    with pytest.raises(PolicyError, match=r"by\(.*lambda.*returned"):
        said(by(lambda call: answer), MM)


def test_what_is_no_policy_is_refused():
    for make, says in [
        (keep, "nothing to match"),
        (lambda: keep("aten.mm"), "takes matchers"),
        (first_of, "no policy"),
        (lambda: first_of(op("aten.mm")), r"write keep\(op"),
        (lambda: both(None), "no policy"),
        (lambda: one_in(0, full()), "above zero"),
        (lambda: by(Decision), "no policy"),
        (only, "one of first"),
        (lambda: only(first=1, last=1), "first, last"),
        (lambda: only(fraction=1.5), "at most at 1"),
        (lambda: every(0), "above zero"),
        (lambda: by_layer_type({}), "no class"),
        (lambda: megatron_selective("mlps"), "core_attn"),
    ]:
        with pytest.raises(InvalidInputError, match=says):
            make()


POLICIES = [
    keep(op("aten.mm", F.linear, torch.Tensor.softmax), inside(nn.Linear, "**.mlp") & ~named("a*"), module(nn.GELU) | shape(2, None)),
    first_of(recompute(inside("**.gate")), both(keep(anything()), keep(size(at_least=80)))),
    limit_bytes(one_in(2, by(large)), "1MiB"),
    every(2, skip_last(1, only(full(), fraction=0.5))),
    segments(3, selective()),
    sqrt(),
    torchtitan("**.router"),
    by_layer_type({nn.TransformerEncoderLayer: full(), "Block": keep(op("aten.mm"))}),
    megatron_selective("mlp", "layernorm"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_policy_goes_through_json_and_is_a_value(policy):
    read = policy_from_json(policy.to_json())
    assert read == policy
    assert hash(read) == hash(policy)
    assert repr(read) == repr(policy)
    assert said(read, MM, RELU, GATE, MM) == said(policy, MM, RELU, GATE, MM)


def test_a_policy_never_changes():
    with pytest.raises(AttributeError):
        full().name = "other"


def test_a_function_without_a_name_cannot_be_written():
    with pytest.raises(InvalidInputError, match="no name under which"):
        by(lambda call: Decision.KEEP).to_json()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "of this version"),
        ('{"format": "lowtide.policy", "version": 2, "policy": {}}', "of this version"),
        ('{"format": "lowtide.policy", "version": 1, "policy": 3}', "'policy' is 3"),
        ('{"format": "lowtide.policy", "version": 1, "policy": {"kind": "Rule", "other": 1}}', "no known kind"),
        (
            '{"format": "lowtide.policy", "version": 1, "policy": {"kind": "By", "function": {"object": "not_there:f"}}}',
            "import not_there first",
        ),
    ],
)
def test_what_is_no_policy_cannot_be_read(text, says):
    with pytest.raises(InvalidInputError, match=says):
        policy_from_json(text)


def test_policies_are_readable():
    policy = first_of(recompute(inside("**.gate")), every(2, limit_bytes(keep(op("aten.mm")), "3MiB")))
    assert repr(policy) == "first_of(recompute(inside('**.gate')), every(2, limit_bytes(keep(op('aten.mm')), '3.00 MiB')))"
    assert repr(skip_last(1, only(middle=2))) == "skip_last(1, only(full(), middle=2))"
    assert repr(torchtitan("a")) == "torchtitan(force_recompute=('a',))"
