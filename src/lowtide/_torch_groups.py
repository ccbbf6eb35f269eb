"""What lowtide needs of ``torch.distributed`` that has no public name. All of it was read in 2.11, 2.13 and 2.14."""

from __future__ import annotations

from typing import Any


def process_groups() -> list[Any]:
    """The groups of processes that this one is in, for their timeouts."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def timeout_of(group: Any) -> Any:
    """How long a collective of a group waits, as a ``timedelta``; ``None`` where its backend does not say."""
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, RuntimeError, IndexError):
        return None


def set_timeout(group: Any, timeout: Any) -> None:
    """How long collectives of a group wait from now on."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timeout, group)
