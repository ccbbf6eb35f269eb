"""What ``_native*.c`` use of lowtide and torch: they are given it here, by name."""

from __future__ import annotations

import torch

from lowtide import _torch_private as private
from lowtide import _torch_tracing as tracing
from lowtide.engine import in_replay
from lowtide.records import Category, Phase
from lowtide.trace._acceleration import native
from lowtide.trace._kinds import ENOUGH
from lowtide.trace._ops import facts_of
from lowtide.trace._source import is_users

if native is not None:
    native.configure(
        {
            "ACTIVATION": Category.ACTIVATION,
            "ADD": torch.ops.aten.add.Tensor,
            "BACKWARD": Phase.BACKWARD,
            "ENOUGH": ENOUGH,
            "FORWARD": Phase.FORWARD,
            "INPUT": Category.INPUT,
            "OPTIMIZER": Phase.OPTIMIZER,
            "Parameter": torch.nn.Parameter,
            "REPLAY": Phase.REPLAY,
            "STRIDED": torch.strided,
            "TEMPORARY": Category.TEMPORARY,
            "Tensor": torch.Tensor,
            "UntypedStorage": torch.UntypedStorage,
            "current_node": tracing.current_node,
            "facts_of": facts_of,
            "graph_task_id": private.graph_task_id,
            "in_replay": in_replay,
            "is_grad_enabled": torch.is_grad_enabled,
            "is_users": is_users,
            "next_sequence_number": private.next_sequence_number,
            "storage_use_count": tracing.storage_use_count,
        }
    )
