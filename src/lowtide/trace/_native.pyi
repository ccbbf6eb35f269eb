from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from lowtide.records import Category

R = TypeVar("R")

API: int

class Storages:
    def __init__(
        self,
        *,
        row_of: dict[int, int],
        sizes: list[int],
        categories: list[Category],
        born: list[int],
        freed: list[int | None],
        resident: list[bool],
        watches: list[Any],
        at_start: dict[int, Any],
        empty_at_start: set[int],
        running: list[tuple[int, int]],
        ops: list[Any],
        size: Callable[[torch.Tensor, torch.UntypedStorage], int] | None,
        entered: Callable[..., int],
        other: Callable[[torch.Tensor, Category], tuple[int, ...]],
        note_replaced: Callable[[int], None],
    ) -> None: ...
    def close(self) -> None: ...
    def rows_of(self, tensors: Sequence[torch.Tensor], category: Category, /) -> tuple[int, ...]: ...

class Recording:
    in_optimizer: bool
    def __init__(
        self,
        *,
        storages: Storages,
        ops: list[Any],
        makers: dict[int | None, int],
        kinds: dict[Any, Any] | None,
        kinds_of_ops: list[Any] | None,
        peaks: list[int] | None,
        running: list[tuple[int, int]],
        refills: list[tuple[int, int]],
        note_emptied: Callable[[], None],
        is_replay: Callable[[], bool],
        is_in_place: Callable[[tuple[Any, ...]], bool],
        counts: tuple[int, int],
        move: Callable[[torch.Tensor, torch.Tensor], None],
        run: Callable[..., Any],
    ) -> None: ...
    def dispatch(self, mode: Any, func: Any, types: Any, args: tuple[Any, ...] = ..., kwargs: dict[str, Any] | None = ..., /) -> Any: ...

class Saving:
    def __init__(
        self,
        *,
        storages: Storages,
        made: list[Any],
        uses: list[Any],
        released: list[int | None],
        copies: dict[tuple[int, int], Any],
        refilled: set[int],
        running: list[tuple[int, int]],
        ops: list[Any],
        functions: Any,
        watches: dict[int, Any],
        without_modes: Any,
        copied: Callable[[torch.Tensor, tuple[int, int]], tuple[Any, Any]],
        rebuilt: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
        handed_out: Callable[[torch.Tensor, Any], None],
    ) -> None: ...
    def __call__(self, tensor: torch.Tensor, /) -> Any: ...
    def unpack(self, packed: Any, /) -> torch.Tensor: ...

def configure(parts: dict[str, Any], /) -> None: ...
def records_of(record: type[R], /, *columns: Sequence[Any]) -> tuple[R, ...]: ...
