"""Sparse tensors: what has memory are the tensors that hold their indices and their values."""

from __future__ import annotations

import torch

from lowtide._torch_private import is_functorch_wrapped
from lowtide._torch_tracing import unseen

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def parts_of_sparse(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors of which a sparse one consists; none of any other."""
    names = _PARTS.get(tensor.layout)
    if names is None or type(tensor) not in _PLAIN or is_functorch_wrapped(tensor):
        return []
    with unseen():
        return [getattr(tensor, name)() for name in names]
