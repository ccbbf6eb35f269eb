"""How much memory a device has left, for ``auto`` budgets."""

from __future__ import annotations

from pathlib import Path

import torch

from lowtide.errors import BudgetError

_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process could still allocate on ``device``.

    Raises:
        BudgetError: the system does not tell.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + reusable
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError as error:
        raise BudgetError(
            f"the budget 'auto' needs the free memory of {device}, which this system does not tell: give bytes or a share"
        ) from error
    [available] = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return available * 1024
