"""Small real models with data: what the demo, the tests and the benchmarks train.

Nothing in them knows of lowtide beyond the value that they return. Data is what every machine with Python has,
the sources of its standard library, so that nothing is downloaded. Initial weights and batches are drawn from torch's
global generator: the same random state gives the same model and the same steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.workloads.gpt import gpt
from lowtide.workloads.resnet import resnet
from lowtide.workloads.unet import unet

if TYPE_CHECKING:
    from collections.abc import Callable

    from lowtide.workload import Workload

__all__ = ["WORKLOADS", "bundled", "gpt", "resnet", "unet"]

WORKLOADS: dict[str, Callable[..., Workload]] = {"gpt": gpt, "resnet": resnet, "unet": unet}


def bundled(name: str, **sizes: Any) -> Workload:
    """Make a bundled workload by its name.

    Args:
        name: a key of ``WORKLOADS``.
        **sizes: what the workload's own function takes.

    Raises:
        KeyError: there is none of that name.

    >>> bundled("resnet", batch=2, widths=(4, 8), depths=(1, 1)).name
    'resnet'
    """
    return WORKLOADS[name](**sizes)
