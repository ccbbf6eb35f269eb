"""Minimum cuts of a directed graph whose edges have a price, in whole numbers as ``scipy`` wants them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

_FINITE = 10**9
"""What the prices of all edges add up to; an edge that is not to be cut costs more than all of them."""


class Network:
    """A graph between a source, node 0, and a sink, node 1."""

    def __init__(self, nodes: int) -> None:
        """Have no edges.

        Args:
            nodes: how many there are, source and sink included.
        """
        self._nodes = nodes
        self._tails: list[int] = []
        self._heads: list[int] = []
        self._prices: list[float] = []

    def edge(self, tail: int, head: int, price: float = np.inf) -> None:
        """Add an edge; without a price it is never cut."""
        self._tails.append(tail)
        self._heads.append(head)
        self._prices.append(price)

    def source_side(self) -> NDArray[np.bool_]:
        """Of each node, whether it is on the source's side of the cheapest cut."""
        prices = np.array(self._prices)
        total = prices[np.isfinite(prices)].sum() or 1.0
        whole = np.where(np.isfinite(prices), np.rint(np.nan_to_num(prices, posinf=0.0) / total * _FINITE), 2 * _FINITE).astype(np.int32)
        shape = (self._nodes, self._nodes)
        capacity = csr_matrix((whole, (self._tails, self._heads)), shape=shape)
        flow = maximum_flow(capacity, 0, 1).flow
        left = csr_array(capacity - flow)
        left.data = np.where(left.data > 0, 1, 0)
        left.eliminate_zeros()
        side = np.zeros(self._nodes, dtype=bool)
        side[breadth_first_order(left, 0, return_predecessors=False)] = True
        return side
