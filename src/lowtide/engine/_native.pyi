from collections.abc import Callable
from typing import Any

import torch

API: int

class Slot:
    dtype: torch.dtype
    frame: Any
    given: bool
    index: int
    ref: Callable[[], torch.Tensor | None]
    shape: Any
    value: torch.Tensor | None
    version: int

class Packing:
    frame: Any
    def __init__(
        self,
        slots: list[Any],
        plain: list[int],
        grads: list[bool],
        first: int,
        frame: object,
        region: object,
        keep_free: Callable[[torch.Tensor, Any], Any],
        /,
    ) -> None: ...
    def __call__(self, tensor: torch.Tensor, /) -> Any: ...

class Filling:
    reached: int
    def __init__(self, slots: list[Any], last: int, stop: int, /) -> None: ...
    def __call__(self, tensor: torch.Tensor, /) -> None: ...

class Surroundings:
    def __init__(self, getters: tuple[Callable[[], Any], ...], parametrize: dict[str, Any], cached: str, no_weights: object, /) -> None: ...
    def are(self, ambient: tuple[Any, ...], /) -> bool: ...

def are_unmodified(watches: list[Any], /) -> bool: ...
def are_versions(tensors: list[Any], versions: list[int], /) -> bool: ...
def configure(slot: type, gone: object, stop_replay: type[BaseException], unpack: Callable[[Any], torch.Tensor], /) -> None: ...
def drop_values(slots: list[Any], given_only: bool, /) -> None: ...
def last_wanted(slots: list[Any], wanted: int, end: int, /) -> int: ...
def same_values(tables: list[dict[Any, Any]], sizes: list[int], values: list[Any], skipped: list[int], /) -> bool: ...
def unpack(packed: Any, /) -> torch.Tensor: ...
def values_of(tables: list[dict[Any, Any]], sizes: list[int], /) -> list[Any] | None: ...
def versions_of(tensors: list[Any], /) -> list[int]: ...
