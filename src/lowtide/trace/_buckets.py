"""The buffers in which ``DistributedDataParallel`` averages gradients: there all the time, though no Python object stands for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide import _torch_private as private
from lowtide.records import Category, StepTrace, Storage


def bucket_sizes(model: nn.Module) -> list[int]:
    """Bytes of each buffer; none where gradients are views of them."""
    return [size for module in model.modules() if isinstance(module, DistributedDataParallel) for size in _of_replica(module)]


def _of_replica(replica: DistributedDataParallel) -> list[int]:
    told = private.told_by_replica(replica)
    sizes = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]
    return [] if told["gradient_as_bucket_view"] else [int(size) for size in sizes.split(", ")]


def with_buckets(trace: StepTrace, sizes: list[int]) -> StepTrace:
    """A trace in which these buffers are there before the step: a storage that an op wrote to and did not make, or that none touched."""
    if not sizes:
        return trace
    left, storages = Counter(sizes), list(trace.storages)
    for index, storage in enumerate(storages):
        is_older = not storage.resident and storage.freed == len(trace.ops) and index in trace.ops[storage.born].writes
        if is_older and left[storage.bytes] > 0:
            left[storage.bytes] -= 1
            storages[index] = replace(storage, category=Category.GRADIENT, born=0, resident=True)
    untouched = (Storage(size, Category.GRADIENT, 0, len(trace.ops), True) for size in left.elements())
    return replace(trace, storages=(*storages, *untouched))
