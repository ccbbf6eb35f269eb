"""What picks out calls: ops in every spelling, modules, names, sizes, shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.errors import InvalidInputError
from lowtide.policy import anything, inside, is_random, made_of, module, named, op, shape, size

from ._sites import aten, calls, site

LINEAR = site(F.linear, aten.addmm.default)


@pytest.mark.parametrize(
    "target",
    [
        "aten.addmm",
        "aten.addmm.default",
        "torch.ops.aten.addmm",
        aten.addmm,
        aten.addmm.default,
        F.linear,
        "F.linear",
        "aten.linear",
        aten.linear,
    ],
)
def test_an_op_is_found_by_overload_packet_and_function(target):
    assert op(target).matches(LINEAR)


@pytest.mark.parametrize("target", ["aten.mm", "aten.addmm.out", aten.addmv, F.bilinear, torch.mm, "aten.add"])
def test_another_op_is_not(target):
    assert not op(target).matches(LINEAR)


@pytest.mark.parametrize("function", [torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__])
def test_methods_and_operators_are_the_function(function):
    assert op(torch.matmul).matches(site(function))
    assert op("Tensor.matmul").matches(site(function))


def test_an_operator_in_place_is_another_function():
    assert not op(torch.relu).matches(site(torch.relu_))


def test_an_overload_is_not_a_function_of_its_name():
    assert op("aten.max.default").matches(site(torch.max, aten.max.default))
    assert not op("aten.max.default").matches(site(torch.max, aten.max.dim))
    assert op("aten.max").matches(site(torch.max, aten.max.dim))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def own(x):
    return x


def test_own_functions_are_themselves():
    assert op(own).matches(site(own))
    assert not op(own).matches(site(lambda x: x))


def test_autograd_functions_are_their_calls():
    assert op(Double).matches(site(Double.apply))
    assert not op(Double).matches(site(torch.autograd.Function.apply))


def test_a_namespace_matches_all_its_ops():
    assert op("_c10d_functional.*").matches(site(own, torch.ops._c10d_functional.all_reduce.default))
    assert not op("_c10d_functional.*").matches(LINEAR)


def test_ops_are_those_of_functions():
    assert not op("aten.addmm").matches(calls(nn.Linear(2, 2), "blocks.0.up"))
    assert not anything().matches(calls(nn.Linear(2, 2), "blocks.0.up"))


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("aten.adddmm", "did you mean .*addmm"),
        ("aten.mm.sparse", r"overload 'aten.mm.sparse'; aten.mm has default"),
        ("F.liner", "did you mean linear"),
        ("matmul", "no op 'matmul'"),
        ("no_such_module:f", "import no_such_module first"),
        (3, "3 is no op"),
    ],
)
def test_a_name_that_torch_does_not_know_is_refused(target, says):
    with pytest.raises(InvalidInputError, match=says):
        op(target)


def test_a_matcher_needs_something_to_match():
    for make in (op, module, inside, named):
        with pytest.raises(InvalidInputError, match="nothing to match"):
            make()


def test_what_is_made_of_an_op_alone():
    products = made_of("aten.addmm", "aten.bmm")
    assert products.matches(LINEAR)
    assert products.matches(site(F.linear, aten._to_copy.default, aten.addmm.default, aten.add_.Tensor))
    assert products.matches(site(torch.matmul, aten.clone.default, aten.bmm.default))
    assert not products.matches(site(F.scaled_dot_product_attention, aten.bmm.default, aten._softmax.default, aten.bmm.default))
    assert not products.matches(site(torch.clone, aten.clone.default))
    with pytest.raises(InvalidInputError, match="not the function"):
        made_of(F.linear)
    with pytest.raises(InvalidInputError, match="nothing to match"):
        made_of()


class Gate(nn.Linear):
    pass


def test_a_module_is_found_by_class_and_path():
    gate = calls(Gate(2, 2), "layers.3.moe.gate", nn.Sequential)
    for target in (nn.Linear, Gate, "layers.*.moe.gate", "**.gate", "layers.3.moe.gate", "**"):
        assert module(target).matches(gate)
    for target in (nn.Conv2d, "*.gate", "layers.*.gate", "gate", "layers.3.moe"):
        assert not module(target).matches(gate)
    assert not module(nn.Linear).matches(site(F.linear, module="layers.3.moe.gate", module_types=(Gate,)))


def test_inside_are_all_calls_of_a_module_and_of_those_in_it():
    call = site(F.linear, module="layers.3.moe.experts.0", module_types=(nn.ModuleDict, Gate))
    for target in (nn.ModuleDict, Gate, nn.Linear, "layers.*", "**.moe", "layers.3.moe.experts.*"):
        assert inside(target).matches(call)
    for target in (nn.Conv2d, "layers.2", "**.experts.1"):
        assert not inside(target).matches(call)


def test_names_of_wrappers_are_no_part_of_a_path():
    assert inside("blocks.0.mlp").matches(site(module="_orig_mod.blocks.0._fsdp_wrapped_module.mlp._checkpoint_wrapped_module"))


def test_names_sizes_shapes_and_randomness():
    call = site(name="attn_out", output_bytes=2**20, shapes=((4, 8, 2), (3,)), random=True)
    for matcher in (
        named("attn_out"),
        named("attn*"),
        size(at_least="1MiB"),
        size(at_most=2**20),
        shape(4, None, 2),
        shape(3),
        is_random(),
    ):
        assert matcher.matches(call), matcher
    for matcher in (named("attn"), size(at_least="1.1MiB"), size(at_most=5), shape(4, 8), shape(4, 8, 3), ~is_random()):
        assert not matcher.matches(call), matcher
    assert not named("*").matches(site())


def test_matchers_are_joined():
    mm, relu = op("aten.mm"), op("aten.relu")
    assert (mm | op("aten.addmm")).matches(LINEAR)
    assert (op("aten.addmm") & ~relu).matches(LINEAR)
    assert not (op("aten.addmm") & mm).matches(LINEAR)
    assert (mm | relu).alternatives() == (mm, relu)


def test_matchers_are_readable_values():
    matcher = op("aten.mm", F.linear) & ~(inside(nn.Linear) | named("a")) & size(at_least="2KiB", at_most="1MiB") & shape(2, None)
    assert repr(matcher) == (
        "(op('aten.mm') | op(F.linear)) & ~(inside(Linear) | named('a')) & size(at_least='2.00 KiB', at_most='1.00 MiB') & shape(2, None)"
    )
    assert op("aten.mm") == op(torch.ops.aten.mm)
    assert len({op("aten.mm"), op("aten.mm"), op("aten.mm.default")}) == 2
