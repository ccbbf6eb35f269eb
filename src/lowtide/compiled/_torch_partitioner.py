"""What lowtide needs of AOTAutograd's partitioner, which has no public names. All of it was read in 2.11, 2.13 and 2.14.

Imported when something is compiled: its parts take long to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch import partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

Saved = list[fx.Node]
Own = Callable[[float], Saved]
"""What PyTorch itself would save, for a share of the bytes that it would save else."""
Choose = Callable[[fx.Graph, Any, Own], Saved]

aten = torch.ops.aten
_UNKNOWN_SIZE = 4096  # as in PyTorch
op_types = partitioners.get_default_op_list()
size_of: Callable[[fx.Node], int] = partitioners._size_of
must_recompute: Callable[[fx.Node], bool] = partitioners.must_recompute
is_sym_node: Callable[[fx.Node], bool] = partitioners.is_sym_node  # type: ignore[attr-defined]


@contextmanager
def choosing(choose: Choose) -> Iterator[None]:
    """In here, what is saved is what ``choose`` says.

    It is given the joint graph, what PyTorch knows of its nodes, and a function that returns what PyTorch itself would save.
    """
    original = partitioners.choose_saved_values_set

    def chosen(graph: fx.Graph, info: Any, memory_budget: float = 1) -> Saved:
        return choose(graph, info, lambda share: original(graph, info, memory_budget=share))

    partitioners.choose_saved_values_set = chosen  # type: ignore[assignment]
    try:
        yield
    finally:
        partitioners.choose_saved_values_set = original


def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's own partitioner."""
    return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)


def outputs_of(graph: fx.Graph, count: int) -> tuple[list[fx.Node], list[fx.Node], set[fx.Node]]:
    """What forward returns, what backward returns, and the inputs that are written to in between.

    Args:
        graph: the joint graph.
        count: how many of its outputs are forward's.
    """
    module: Any = graph.owning_module
    forward, backward, described, _ = partitioners._extract_fwd_bwd_outputs(module, num_fwd_outputs=count)
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    by_place = [node for name, node in inputs.items() if "primals" in str(node.target)]
    written = {node.args[0] for node in graph.nodes if node.target is aten.copy_.default}
    for description in described:
        if isinstance(description, InputMutationAOTOutput):
            written |= _input_of(description.mutated_input, by_place)
    return _nodes(forward), _nodes(backward), written & set(inputs.values())


def _input_of(description: Any, inputs: list[fx.Node]) -> set[fx.Node]:
    found = {node for node in inputs if node.meta.get("desc") == description}
    return found or set(inputs)  # not told which: none of them is sure to be as it was


def _nodes(values: list[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def is_random(node: fx.Node) -> bool:
    """Whether running a node again may give other values. Attention without dropout is tagged as random, and is not."""
    tags = getattr(node.target, "tags", ())
    if op_types.is_random(node) or "inductor_seed" in str(node.target):
        return True
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    return not _attends_without_dropout(node)


def _attends_without_dropout(node: fx.Node) -> bool:
    target: Any = node.target
    if "attention" not in str(target):
        return False
    named = dict(zip([argument.name for argument in target._schema.arguments], node.args, strict=False)) | node.kwargs
    defaults = {argument.name: argument.default_value for argument in target._schema.arguments}
    return bool((named | {}).get("dropout_p", defaults.get("dropout_p")) == 0.0)


def hint(size: Any) -> int:
    """A size, or what a symbol stands for in the step that is compiled."""
    return size if isinstance(size, int) else int(size.node.hint if size.node.has_hint() else _UNKNOWN_SIZE)
