"""Why a tensor is alive: everything that holds its storage, from its birth until it is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.errors import InvalidInputError
from lowtide.explain._step import StepView, is_inside, node_of, path_name
from lowtide.records import Category, StepTrace

NATURAL = "code"
SAVED = "saved"
INPUT = "input"


@dataclass(frozen=True, slots=True)
class Holder:
    """One thing that keeps a storage alive.

    Attributes:
        kind: ``"code"``: variables of the running code; ``"saved"``: autograd, for a backward node; ``"input"``: the
            call of a module that has it as an argument.
        name: the backward node, or the type of the module; for code, the last op that touches it.
        path: of the module.
        source: the user's line, where it is known.
        since, until: ops; it is held while ``since <= op < until``.
    """

    kind: str
    name: str
    path: str
    source: str
    since: int
    until: int


@dataclass(frozen=True, slots=True)
class Alive:
    """The life of one storage.

    Attributes:
        storage: index in the trace.
        bytes: its size.
        category: what it is for.
        resident: it was there before the step.
        made_by, path, source: the op that allocated it, its module and its line.
        born, natural_end, end: ops; from ``natural_end`` to ``end`` only autograd keeps it.
        holders: in the order in which they let go.
    """

    storage: int
    bytes: int
    category: Category
    resident: bool
    made_by: str
    path: str
    source: str
    born: int
    natural_end: int
    end: int
    holders: tuple[Holder, ...]

    @property
    def waits_for(self) -> Holder | None:
        """What lets go last."""
        return self.holders[-1] if self.holders else None


def why_alive(trace: StepTrace, target: int | str, *, most: int = 10) -> tuple[Alive, ...]:
    """Explain what keeps a storage alive, or the storages that a module makes.

    Args:
        trace: of the step.
        target: index of a storage, or the path of a module (``""`` is the model itself).
        most: of a module, how many storages: those with the most bytes times ops alive.

    Raises:
        InvalidInputError: the trace has no such storage or module.
    """
    view = StepView(trace)
    return tuple(_life(view, storage) for storage in _storages(view, target)[:most])


def _storages(view: StepView, target: int | str) -> list[int]:
    trace = view.trace
    if isinstance(target, int):
        if not 0 <= target < len(trace.storages):
            raise InvalidInputError(f"the trace has storages 0 to {len(trace.storages) - 1}, but was asked for {target}")
        return [target]
    if not any(call.path == target for call in trace.calls):
        known = ", ".join(sorted({call.path for call in trace.calls})[:8])
        raise InvalidInputError(f"the traced step calls no module {target!r}: it calls {known}, …")
    made = [s for s in range(len(trace.storages)) if not trace.storages[s].resident and is_inside(view.owner(s), target)]
    return sorted(made, key=lambda s: -int(view.bytes[s]) * int(view.end[s] - view.born[s]))


def _life(view: StepView, storage: int) -> Alive:
    record, maker = view.trace.storages[storage], view.maker(storage)
    name, source = (maker.name, maker.source) if maker else ("", "")
    holders = sorted((_code(view, storage), *_saved(view, storage), *_calls(view, storage)), key=lambda h: (h.until, h.since))
    return Alive(
        storage=storage,
        bytes=record.bytes,
        category=record.category,
        resident=record.resident,
        made_by=name,
        path=path_name(view.owner(storage)),
        source=source,
        born=record.born,
        natural_end=record.freed,
        end=int(view.end[storage]),
        holders=tuple(holders),
    )


def _code(view: StepView, storage: int) -> Holder:
    """Variables of the running code, until the last op that touches it, or longer where something keeps a reference."""
    record = view.trace.storages[storage]
    last = max((op for op in view.readers.get(storage, []) if op < record.freed), default=min(record.born, record.freed - 1))
    op = view.op(last)
    name, source = (op.name, op.source) if op else ("", "")
    return Holder(NATURAL, name, path_name(view.path_of_op(last)), source, record.born, record.freed)


def _saved(view: StepView, storage: int) -> Iterator[Holder]:
    for slot in view.slots_of_storage.get(storage, []):
        tensor = view.trace.saved[slot]
        op = view.op(tensor.position - 1)
        yield Holder(
            SAVED, node_of(tensor), path_name(view.path_of_call(tensor.call)), op.source if op else "", tensor.position, tensor.released
        )


def _calls(view: StepView, storage: int) -> Iterator[Holder]:
    """Of calls inside each other that all have it as their argument, the outermost."""
    stop = 0
    for call in view.trace.calls:
        if storage in call.inputs and call.end > stop:
            stop = call.end
            yield Holder(INPUT, call.type, path_name(call.path), "", call.start, call.end)
