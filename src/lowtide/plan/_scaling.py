"""The trace of a step of another size, from traces of two sizes.

Whether a plan for one batch size serves another, and which plan does, is asked of a trace of that size; where the step does not fit
yet, there is none. What a step does mostly stays the same while its batch, or the length of its sequences, grows, and bytes grow in
proportion: two traces say by how much each storage does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lowtide.errors import InvalidInputError
from lowtide.records import Op, SavedTensor, StepTrace, Storage


def trace_at(one: StepTrace, other: StepTrace, sizes: tuple[int, int], size: int) -> StepTrace:
    """What the trace of a step would be at another batch size or sequence length.

    Bytes, times and shapes are taken to grow by the same amount for each unit of size: right for batch sizes, and for the length of
    sequences where attention keeps no matrix of scores. ``trace_at(one, other, (4, 8), 8)`` has the bytes of ``other``.

    Args:
        one, other: of the same step at two sizes.
        sizes: those two.
        size: the one that is asked for.

    Returns:
        A trace for ``solve``, ``simulate`` and ``frontier``. A plan made of it is for the same model, at that size.

    Raises:
        InvalidInputError: the sizes are equal or not positive, the steps do not do the same (the message names the first difference),
            or something would have fewer bytes than none.
    """
    if sizes[0] == sizes[1] or min(*sizes, size) < 1:
        raise InvalidInputError(f"two different sizes and one to find are needed, all positive: found {sizes} and {size}")
    _refuse_different(one, other)
    along = (size - sizes[0]) / (sizes[1] - sizes[0])
    return replace(
        one,
        ops=tuple(_op(a, b, along) for a, b in zip(one.ops, other.ops, strict=True)),
        storages=tuple(_storage(i, a, b, along) for i, (a, b) in enumerate(zip(one.storages, other.storages, strict=True))),
        saved=tuple(_saved(a, b, along) for a, b in zip(one.saved, other.saved, strict=True)),
    )


def _op(one: Op, other: Op, along: float) -> Op:
    return replace(
        one,
        seconds=max(one.seconds + (other.seconds - one.seconds) * along, 0.0),
        workspace_bytes=max(_between(one.workspace_bytes, other.workspace_bytes, along), 0),
        born_bytes=max(_between(one.born_bytes, other.born_bytes, along), 0),
    )


def _storage(place: int, one: Storage, other: Storage, along: float) -> Storage:
    size = _between(one.bytes, other.bytes, along)
    if size < 0:
        raise InvalidInputError(
            f"storage {place} has {one.bytes} bytes at one size and {other.bytes} at the other: less than none at the third"
        )
    return replace(one, bytes=size)


def _saved(one: SavedTensor, other: SavedTensor, along: float) -> SavedTensor:
    shape = tuple(max(_between(a, b, along), 0) for a, b in zip(one.shape, other.shape, strict=True))
    return replace(one, bytes=max(_between(one.bytes, other.bytes, along), 0), shape=shape)


def _between(one: int, other: int, along: float) -> int:
    return one + round((other - one) * along)


def _refuse_different(one: StepTrace, other: StepTrace) -> None:
    if one.fingerprint != other.fingerprint:
        raise InvalidInputError("the two traces are of models of different structure: trace the same model at both sizes")
    for what, first, second in _parts(one, other):
        differs = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if differs is None and len(first) == len(second):
            continue
        place = min(len(first), len(second)) if differs is None else differs
        found, instead = (str(side[place]) if place < len(side) else "nothing" for side in (first, second))
        raise InvalidInputError(
            "the two steps do not do the same, so that neither says how the other grows: "
            f"{what} {place} is {found} in one and {instead} in the other"
        )


def _parts(one: StepTrace, other: StepTrace) -> Iterator[tuple[str, Sequence[object], Sequence[object]]]:
    """What has to be equal, the most telling first."""
    reads: dict[str, Callable[[StepTrace], Sequence[object]]] = {
        "op": lambda t: [(op.name, op.phase.value, op.call) for op in t.ops],
        "call": lambda t: [(c.path, c.start, c.end, c.inputs, c.outputs, c.replayable, c.replaced) for c in t.calls],
        "storage": lambda t: [(s.category.value, s.born, s.freed, s.resident) for s in t.storages],
        "saved tensor": lambda t: [(s.storage, s.call, s.position, s.used, s.released, len(s.shape)) for s in t.saved],
        "function": lambda t: t.functions,
    }
    for what, read in reads.items():
        yield what, read(one), read(other)
