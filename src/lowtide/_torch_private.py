"""Private names of torch that lowtide needs, each with what it is for and the versions it was read in."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether this thread is running a backward pass (read in 2.11, 2.13, 2.14)."""
    return torch._C._current_graph_task_id() != -1


def running_node_name() -> str:
    """Name of the backward node that is running, empty outside of backward (read in 2.11, 2.13, 2.14)."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()
