"""What the public data sheets say of some GPUs: peak arithmetic by type, and bandwidth of the memory.

Arithmetic is that of dense matrices on tensor cores with sums in float32, where there are such cores for the type; sheets often print twice
as much, for matrices with half their entries zero. Plain float32 is listed without TF32, which torch uses only when told to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peaks of a GPU.

    Attributes:
        name: key in ``GPUS``.
        memory_bytes: nominal.
        bytes_per_s: of the memory.
        half: operations a second in float16, and bfloat16 where it has it.
        single: in float32.
        tf32: in float32 when TF32 is allowed.
        double: in float64.
        has_bfloat16: whether bfloat16 is as fast as float16; else it runs as float32.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    half: float
    single: float
    tf32: float
    double: float
    has_bfloat16: bool = True

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Peak operations a second on matrices of a type."""
        if dtype is torch.float16 or (dtype is torch.bfloat16 and self.has_bfloat16):
            return self.half
        if dtype is torch.float64:
            return self.double
        return self.tf32 if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest" else self.single


_T = 1e12
_ALL = (
    Gpu("a10", 24e9, 600e9, 125 * _T, 31.2 * _T, 62.5 * _T, 0.49 * _T),
    Gpu("a100-40gb", 40e9, 1555e9, 312 * _T, 19.5 * _T, 156 * _T, 19.5 * _T),
    Gpu("a100-80gb", 80e9, 2039e9, 312 * _T, 19.5 * _T, 156 * _T, 19.5 * _T),
    Gpu("h100-80gb", 80e9, 3350e9, 989 * _T, 67 * _T, 494 * _T, 67 * _T),
    Gpu("h100-pcie", 80e9, 2000e9, 756 * _T, 51 * _T, 378 * _T, 51 * _T),
    Gpu("h200", 141e9, 4800e9, 989 * _T, 67 * _T, 494 * _T, 67 * _T),
    Gpu("l4", 24e9, 300e9, 121 * _T, 30.3 * _T, 60 * _T, 0.47 * _T),
    Gpu("l40s", 48e9, 864e9, 362 * _T, 91.6 * _T, 183 * _T, 1.4 * _T),
    Gpu("rtx3090", 24e9, 936e9, 71 * _T, 35.6 * _T, 35.6 * _T, 0.56 * _T),
    Gpu("rtx4090", 24e9, 1008e9, 165 * _T, 82.6 * _T, 82.6 * _T, 1.3 * _T),
    Gpu("t4", 16e9, 320e9, 65 * _T, 8.1 * _T, 8.1 * _T, 0.25 * _T, has_bfloat16=False),
    Gpu("v100-32gb", 32e9, 900e9, 125 * _T, 15.7 * _T, 15.7 * _T, 7.8 * _T, has_bfloat16=False),
)
GPUS = {gpu.name: gpu for gpu in _ALL}
_SHORT = {"a100": "a100-80gb", "h100": "h100-80gb", "v100": "v100-32gb", "4090": "rtx4090", "3090": "rtx3090"}


def gpu_named(name: str) -> Gpu:
    """The GPU of a name.

    Raises:
        InvalidInputError: it is not in the table.

    >>> gpu_named("H100").name
    'h100-80gb'
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    found = GPUS.get(_SHORT.get(key, key))
    if found is None:
        raise InvalidInputError(f"no cost model for the GPU {name!r}: there are {', '.join(GPUS)}")
    return found
