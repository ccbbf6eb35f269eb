"""The same step in FP32 and under autocast, so that what the precision does is not blamed on replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.measure import BACKWARD, OPTIMIZER, phases_told
from lowtide.verify._difference import distance_across
from lowtide.verify._result import Precision
from lowtide.verify._runs import Observed

_COMPARED = ("loss", "result ", "output ", "gradient of ")


class Autocast:
    """Runs a step with autocast switched off, or on: the step's own where it has one, else one around forward and loss.

    Args:
        device: whose autocast.
        dtype: of the one that is put around a step that has none.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._kind, self._dtype = device.type, dtype
        self._own: torch.dtype | None = None

    @property
    def dtype(self) -> str:
        """The dtype of autocast, ``bfloat16``."""
        return str(self._own or self._dtype).removeprefix("torch.")

    @contextmanager
    def off(self) -> Iterator[None]:
        """While in this context, autocast contexts that are entered do nothing; the step's own is noted."""
        entered = torch.autocast.__enter__

        def enter(context: Any) -> Any:
            result = entered(context)  # type: ignore[no-untyped-call]
            if torch.is_autocast_enabled(self._kind):
                self._own = torch.get_autocast_dtype(self._kind)
                torch.set_autocast_enabled(self._kind, False)
            return result

        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.autocast.__enter__ = entered  # type: ignore[method-assign]

    @contextmanager
    def on(self) -> Iterator[None]:
        """While in this context, the step runs under autocast; ``off`` must have been used first."""
        if self._own is not None:
            yield
            return
        with torch.autocast(self._kind, self._dtype), phases_told(self._outside):
            yield

    @contextmanager
    def _outside(self, phase: str) -> Iterator[None]:
        """Backward and the optimizer are no business of autocast; its cache of cast weights is stale after an update."""
        if phase not in (BACKWARD, OPTIMIZER):
            yield
            return
        with torch.autocast(self._kind, enabled=False):
            yield
        if phase == OPTIMIZER:
            torch.clear_autocast_cache()


def precision_of(single: Observed, plain: Observed, checkpointed: Observed, dtype: str) -> Precision:
    """What autocast does to the first step, and what is left of that with checkpointing."""
    names = [name for name in single if name.startswith(_COMPARED)]
    far = {name: distance_across(single[name], plain.get(name)) for name in names}
    worst = max(far, key=lambda name: far[name], default="")
    return Precision(dtype, worst, far.get(worst, 0.0), distance_across(single.get(worst), checkpointed.get(worst)))
