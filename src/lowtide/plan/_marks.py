"""Which of some numbers are among others, by marking the others in a row of flags.

``numpy.isin`` sorts, or looks for the range of what it is given; of a few numbers each time that takes ten times as long as the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lowtide.plan._index import Flags, Ints


class Marks:
    """Flags for the numbers from 0 up to, and without, ``size``; and for -1, which stands for none."""

    def __init__(self, size: int) -> None:
        """None are marked."""
        self._marked: Flags = np.zeros(size + 1, dtype=np.bool_)

    def __call__(self, values: Ints, those: Ints) -> Flags:
        """By value, whether it is one of ``those``."""
        self._marked[those] = True
        found: Flags = self._marked[values]
        self._marked[those] = False
        return found
