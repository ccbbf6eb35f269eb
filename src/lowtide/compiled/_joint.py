"""The joint graph of forward and backward as numbers: what each node holds, needs and costs, and what may become of it."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lowtide.compiled import _torch_partitioner as torch_partitioner

_REPLAYABLE = ("aten", "prims")
"""Namespaces whose ops give the same values when they run again, but for the random ones. Of others nobody knows."""


class Joint:
    """A joint graph. Nodes are numbers, in the order of the graph.

    Attributes:
        nodes: of the graph, but for its output.
        number, by_name: of each node.
        inputs, users: of each node.
        is_forward, is_gradient: forward needs it; it depends on the gradients that backward is given.
        bytes: what it allocates: 0 for views, for values that are no tensors, and for what was there before.
        root: whose storage it has.
        is_write: it writes to one of its inputs.
        savable, replayable: it may be handed from forward to backward; it may run again in backward.
        fusible, is_reduction: the compiler may make one loop of it and its neighbours; its result is smaller than what it reads.
        seconds: what it takes to run it again.
        forward_outputs, backward_outputs: what forward and backward return.
        needed: what backward reads that forward can make.
    """

    def __init__(self, graph: fx.Graph, info: Any, forward_count: int, seconds_of: Callable[[fx.Node], float]) -> None:
        """Read a graph.

        Args:
            graph: the joint graph.
            info: what PyTorch's partitioner knows of its nodes.
            forward_count: how many of the graph's outputs are forward's.
            seconds_of: what it takes to run a node once.
        """
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        self.number = {node: i for i, node in enumerate(self.nodes)}
        self.by_name = {node.name: i for i, node in enumerate(self.nodes)}
        count = range(len(self.nodes))
        self.inputs = [sorted({self.number[i] for i in node.all_input_nodes}) for node in self.nodes]
        self.users: list[list[int]] = [[] for _ in count]
        for i in count:
            for j in self.inputs[i]:
                self.users[j].append(i)
        self.is_forward = [info.is_required_fw(node) for node in self.nodes]
        self.is_gradient = [node in info.tangents_closure for node in self.nodes]
        self.is_static = [node in info.static_lifetime_input_nodes for node in self.nodes]
        outputs = torch_partitioner.outputs_of(graph, forward_count)
        self.forward_outputs, self.backward_outputs = ([self.number[node] for node in nodes] for nodes in outputs[:2])
        self.root = list(count)
        for i in count:
            self.root[i] = self._root_of(i)
        self.bytes = [0 if self.is_static[i] or self.root[i] != i else self._own_bytes(i) for i in count]
        self.fusible = [torch_partitioner.op_types.is_fusible(node) or self._is_view(i) for i, node in enumerate(self.nodes)]
        self.is_reduction = [4 * self.size(i) < max((self.size(j) for j in self.inputs[i]), default=0) for i in count]
        self.seconds = [
            seconds_of(node) if node.op == "call_function" and not self._is_view(i) else 0.0 for i, node in enumerate(self.nodes)
        ]
        self.is_write = [isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in self.nodes]
        written = {self.number[node] for node in outputs[2]}
        self.savable = [self._may_be_saved(i) and i not in written for i in count]
        self.replayable = [self._may_be_replayed(node) for node in self.nodes]
        for i in count:
            self.replayable[i] &= not written.intersection(self.inputs[i])
            if self.nodes[i].target is operator.getitem:
                self.replayable[i] &= self.replayable[self.inputs[i][0]]
        ends = {i for i in self.backward_outputs if not self.is_gradient[i]}
        self.needed = sorted(ends.union(j for i in count if self.is_gradient[i] for j in self.inputs[i] if not self.is_gradient[j]))

    @cached_property
    def signature(self) -> str:
        """The same for graphs that compute the same on values of the same shapes."""
        told = hashlib.sha256()
        for node in self.nodes:
            value = node.meta.get("val")
            shapes = [(t.dtype, tuple(map(str, t.shape)), tuple(map(str, t.stride()))) for t in _tensors(value)]
            told.update(f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {shapes}\n".encode())
        return told.hexdigest()

    def size(self, i: int) -> int:
        """Bytes of a value, views included."""
        return sum(t.dtype.itemsize * _hint(t) for t in _tensors(self.nodes[i].meta.get("val")))

    def _own_bytes(self, i: int) -> int:
        value = self.nodes[i].meta.get("val")
        return self.size(i) if isinstance(value, torch.Tensor) else 0  # of a tuple, each part has its own

    def _is_view(self, i: int) -> bool:
        return torch_partitioner.op_types.is_view(self.nodes[i])

    def _root_of(self, i: int) -> int:
        base = self.nodes[i].args[0] if self._is_view(i) and self.nodes[i].args else None
        return self.root[self.number[base]] if isinstance(base, fx.Node) else i

    def _may_be_saved(self, i: int) -> bool:
        node, value = self.nodes[i], self.nodes[i].meta.get("val")
        if node.op == "get_attr" or torch_partitioner.must_recompute(node):
            return False
        if torch_partitioner.is_sym_node(node):
            return isinstance(value, torch.SymInt)
        return "val" in node.meta and not isinstance(value, (tuple, list, dict, torch.SymFloat, torch.SymBool))

    def _may_be_replayed(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return True
        policy = node.meta.get("recompute")
        if node.op != "call_function" or policy == torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE:
            return False
        if torch_partitioner.must_recompute(node) or node.target is operator.getitem:
            return True
        if torch_partitioner.is_sym_node(node):
            return not isinstance(node.meta.get("val"), torch.SymInt)
        target = node.target
        known = isinstance(target, torch._ops.OpOverload) and target.namespace in _REPLAYABLE and not target._schema.is_mutable
        return known and not torch_partitioner.is_random(node)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def _hint(tensor: torch.Tensor) -> int:
    return int(torch_partitioner.hint(tensor.numel()))
