"""What a rank of a pipeline holds, from the trace of a step with one micro-batch on its part of the model.

The forward and the backward of the traced step are put down once for each micro-batch, in the order of the schedule, between what came
before the first and what comes after the last (the optimizer). ``simulate`` and ``solve`` then answer for the rank, with as many
micro-batches in flight as the schedule has there; a region is replayed in the backward of each.

* State of the model is there once. What else was there before the step (tokens, targets, buffers for what other ranks send) is there for
  each micro-batch.
* The first backward of a part makes the gradients that stay; later ones make others, which are gone as soon as they are added up.
* Whatever else a forward or backward made is gone, as the schedule drops it, when the backward of its micro-batch is over. Where gradients
  of weights come later, what autograd saved and the gradients that they are made of are gone when they are made; the first stage needs no
  gradient of its input, and goes backward once, for weights. Results of the last stage are handed back when the step is over.
* What is sent is held by the send. ``Schedule1F1B`` of ``torch.distributed.pipelining`` holds a gradient until the next one is made, and
  what the last forward but one sent before the first backward until there are no forwards left; the other schedules hold all to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.distributed._schedules import BACKWARD, FORWARD, WEIGHTS, Action, actions
from lowtide.distributed._setup import SCHEDULES
from lowtide.errors import InvalidInputError
from lowtide.records import Call, Category, FunctionCall, Gather, Op, Phase, SavedTensor, StepTrace, Storage


def in_pipeline(
    trace: StepTrace,
    rank: int,
    ranks: int,
    micro_batches: int,
    schedule: str = "1f1b",
    parts: Sequence[str] = ("",),
    *,
    returns_results: bool = True,
) -> StepTrace:
    """Rewrite the trace of a step with one micro-batch into that of a rank in a pipeline.

    Args:
        trace: of the un-checkpointed step: a forward of each part that the rank holds, then a backward of each, and the optimizer if there
            is one. The backward of a part that is not the last takes a gradient that was there before the step.
        rank: of the pipeline's ranks.
        ranks: how many stages it has.
        micro_batches: of a step.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` or ``"zero-bubble"``.
        parts: paths of the modules that are the rank's parts, in the order of their forwards; the model itself by default.
        returns_results: the schedule hands the results of all micro-batches back, from the last stage.

    Raises:
        InvalidInputError: no such schedule or rank; several parts in a schedule that has one, or micro-batches that they cannot take turns
            with; a part that the step never calls; forwards after the first backward.
    """
    _check(rank, ranks, micro_batches, schedule, len(parts))
    rewriting = _Rewriting(_Segments(trace, parts), actions(schedule, rank, ranks, micro_batches, len(parts)), micro_batches)
    place = _Place(schedule, rank, ranks, returns_results)
    return rewriting.trace(place)


def _check(rank: int, ranks: int, micro_batches: int, schedule: str, parts: int) -> None:
    if schedule not in SCHEDULES or not 0 <= rank < ranks or micro_batches < 1:
        raise InvalidInputError(
            f"a pipeline has a schedule of {', '.join(SCHEDULES)}, a rank of its ranks, and micro-batches; found {schedule!r}, "
            f"rank {rank} of {ranks}, {micro_batches} micro-batches"
        )
    if parts != 1 and schedule != "interleaved":
        raise InvalidInputError(f"{parts} parts on a rank make an interleaved schedule, not {schedule!r}")
    if parts > 1 and micro_batches % max(1, micro_batches // ranks):
        raise InvalidInputError(f"{parts} parts cannot take turns with {micro_batches} micro-batches on {ranks} ranks: take a multiple")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a pipeline a rank is."""

    schedule: str
    rank: int
    ranks: int
    returns_results: bool

    def has_first(self, part: int) -> bool:
        return self.rank == 0 and part == 0

    def has_last(self, part: int, parts: int) -> bool:
        return self.rank == self.ranks - 1 and part == parts - 1


class _Segments:
    """The ops of a step in a row: before, forward of each part, backward of each part from the last to the first, after."""

    def __init__(self, trace: StepTrace, parts: Sequence[str]) -> None:
        self.trace, self.parts = trace, len(parts)
        self.call_of_part = [_call_of(trace, path) for path in parts]
        self.part_of_call = self._parts_of_calls()
        backward = [i for i, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD]
        if not backward:
            raise InvalidInputError("the step never goes backward: trace one with a forward and a backward of a micro-batch")
        self.begin, self.turn, self.end = trace.calls[self.call_of_part[0]].start, backward[0], backward[-1] + 1
        if any(op.phase is Phase.FORWARD for op in trace.ops[self.turn : self.end]):
            raise InvalidInputError("a forward runs after the first backward: trace a step with one micro-batch")
        self.makes_gradients = self._makes_gradients()
        self.spans = {**self._forwards(), **self._backwards(backward)}

    def _parts_of_calls(self) -> list[int | None]:
        """Of each call, the part that it is or runs in."""
        found: list[int | None] = []
        for index, call in enumerate(self.trace.calls):
            outer = None if call.parent is None else found[call.parent]
            found.append(self.call_of_part.index(index) if index in self.call_of_part else outer)
        return found

    def _forwards(self) -> dict[tuple[str, int], range]:
        starts = [self.trace.calls[call].start for call in self.call_of_part]
        return {(FORWARD, part): range(start, end) for part, (start, end) in enumerate(zip(starts, [*starts[1:], self.turn], strict=True))}

    def _backwards(self, backward: list[int]) -> dict[tuple[str, int], range]:
        starts: dict[int, int] = {self.parts - 1: self.turn}
        for index in backward:
            call = self.trace.ops[index].call
            part = None if call is None else self.part_of_call[call]
            if part is not None:
                starts.setdefault(part, index)
        found, end = {}, self.end
        for part in range(self.parts):
            start = starts.get(part, end)
            found[BACKWARD, part], end = range(start, end), start
        return found

    def is_kept_gradient(self, storage: Storage) -> bool:
        """It is there when backward is over."""
        return storage.category is Category.GRADIENT and (storage.freed > self.end or storage.freed == len(self.trace.ops))

    def _makes_gradients(self) -> set[int]:
        """What backward made and read to make gradients that are kept."""
        made = {s.born for s in self.trace.storages if not s.resident and self.is_kept_gradient(s)}
        read = {storage for op in made for storage in self.trace.ops[op].reads}
        return {index for index in read if not self.trace.storages[index].resident and self.trace.storages[index].born >= self.turn}

    def part_of(self, op: int) -> int | None:
        """The part in whose forward or backward an op ran."""
        return next((part for (_, part), span in self.spans.items() if op in span), None)


def _call_of(trace: StepTrace, path: str) -> int:
    found = next((index for index, call in enumerate(trace.calls) if call.path == path), None)
    if found is None:
        raise InvalidInputError(f"the step never calls {path!r}, which is to be a part of the pipeline: name modules that it calls")
    return found


class _Rewriting:
    """Puts segments down again, and keeps where each op of each micro-batch went."""

    def __init__(self, segments: _Segments, order: tuple[Action, ...], micro_batches: int) -> None:
        self._of, self._order, self._count = segments, order, micro_batches
        self._old = segments.trace
        self._row: list[tuple[int, int]] = []  # the op and the micro-batch of each new op
        self._where: list[dict[int, int]] = [{} for _ in range(micro_batches)]
        self._over: dict[Action, int] = {}  # the new op before which an action is over
        self._put(range(segments.begin), range(micro_batches))
        for action in order:
            self._put(segments.spans.get((action.kind, action.part), range(0)), [action.micro_batch])
            self._over[action] = len(self._row)
        self.over = len(self._row)
        self._put(range(segments.end, len(self._old.ops)), range(micro_batches))

    def _put(self, ops: range, micro_batches: Sequence[int]) -> None:
        for op in ops:
            for micro_batch in micro_batches:
                self._where[micro_batch][op] = len(self._row)
            self._row.append((op, micro_batches[0]))

    def trace(self, place: _Place) -> StepTrace:
        """The whole step of the rank."""
        self._late = {a: over for a, over in self._over.items() if a.kind == WEIGHTS and not place.has_first(a.part)}
        storages, of_storage = self._storages(place)
        calls, of_call = self._calls(of_storage)
        ops = tuple(self._op(op, k, of_storage[k], of_call) for op, k in self._row)
        saved = tuple(self._saved(slot, k, of_storage[k], of_call) for k in range(self._count) for slot in self._old.saved)
        functions = (self._function(f, k, of_storage[k], of_call) for k in range(self._count) for f in self._old.functions)
        in_order = tuple(sorted((f for f in functions if f is not None), key=lambda f: f.start))
        held = tuple(self._sent(place))
        gathers = tuple(sorted(self._gathers(of_storage, of_call), key=lambda gather: gather.call))
        return replace(self._old, ops=ops, storages=(*storages, *held), saved=saved, calls=calls, functions=in_order, gathers=gathers)

    def _at(self, op: int, micro_batch: int) -> int:
        """Where an op went; the end, for none."""
        return self._where[micro_batch].get(op, len(self._row))

    def _until(self, moment: int, micro_batch: int) -> int:
        """What happened right after the op before happens right after it again."""
        return self._where[micro_batch][moment - 1] + 1 if moment else 0

    def _storages(self, place: _Place) -> tuple[list[Storage], list[dict[int, int]]]:
        found: list[Storage] = []
        places: list[dict[int, int]] = [{} for _ in range(self._count)]
        results = self._results(place)
        for index, storage in enumerate(self._old.storages):
            part = None if storage.resident else self._of.part_of(storage.born)
            copies = [self._once(storage)] if part is None else self._each(index, part, index in results)
            for k in range(self._count):
                places[k][index] = len(found) + (k if len(copies) > 1 else 0)
            found += copies
        return found, places

    def _once(self, storage: Storage) -> Storage:
        """What was there before the step, or was made before the first forward or after the last backward."""
        each = storage.resident and storage.category is Category.INPUT
        size = storage.bytes * (self._count if each else 1)
        return replace(storage, bytes=size, born=self._at(storage.born, 0), freed=self._until(storage.freed, self._count - 1))

    def _each(self, index: int, part: int, is_result: bool) -> list[Storage]:
        return [self._copy(index, part, k, is_result) for k in range(self._count)]

    def _copy(self, index: int, part: int, micro_batch: int, is_result: bool) -> Storage:
        storage = self._old.storages[index]
        born, freed = self._at(storage.born, micro_batch), self._until(storage.freed, micro_batch)
        if self._of.is_kept_gradient(storage):
            return replace(storage, born=born, freed=freed if micro_batch == 0 else self._until(self._added_up(storage.born), micro_batch))
        if index in self._of.makes_gradients and Action(WEIGHTS, part, micro_batch) in self._late:
            return replace(storage, born=born, freed=self._late[Action(WEIGHTS, part, micro_batch)])
        return replace(storage, born=born, freed=self.over if is_result else min(freed, self._over[Action(BACKWARD, part, micro_batch)]))

    def _added_up(self, born: int) -> int:
        """When a gradient that an op made is added up: the backward node that it runs for is over."""
        ops = self._old.ops
        return next((i for i in range(born + 1, self._of.end) if ops[i].origin != ops[born].origin), self._of.end)

    def _results(self, place: _Place) -> set[int]:
        """Storages that the last stage hands back."""
        last = self._of.parts - 1
        if not (place.returns_results and place.has_last(last, self._of.parts)):
            return set()
        return set(self._old.calls[self._of.call_of_part[last]].outputs)

    def _calls(self, of_storage: list[dict[int, int]]) -> tuple[tuple[Call, ...], dict[tuple[int, int], int]]:
        """In order of entry."""
        found: list[Call] = []
        places: dict[tuple[int, int], int] = {}
        for action in (action for action in self._order if action.kind == FORWARD):
            k = action.micro_batch
            for index, call in enumerate(self._old.calls):
                if self._of.part_of_call[index] == action.part:
                    places[index, k] = len(found)
                    found.append(self._call(call, k, of_storage[k], places))
        return tuple(found), places

    def _call(self, call: Call, k: int, of_storage: dict[int, int], places: dict[tuple[int, int], int]) -> Call:
        parent = None if call.parent is None else places.get((call.parent, k))
        inputs, outputs = _mapped(call.inputs, of_storage), _mapped(call.outputs, of_storage)
        replaced = _mapped(tuple(storage for storage in call.replaced if storage in of_storage), of_storage)
        end = self._until(call.end, k)
        start = min(self._at(call.start, k), end)
        return replace(call, parent=parent, start=start, end=end, inputs=inputs, outputs=outputs, replaced=replaced)

    def _gathers(self, of_storage: list[dict[int, int]], of_call: dict[tuple[int, int], int]) -> Iterator[Gather]:
        for gather in self._old.gathers:
            for k in (k for k in range(self._count) if (gather.call, k) in of_call):
                whole = (self.over, self.over) if gather.is_extra else (self._at(gather.whole_from, k), self._until(gather.whole_until, k))
                yield Gather(of_call[gather.call, k], _mapped(gather.storages, of_storage[k]), gather.seconds, *whole)

    def _op(self, index: int, k: int, of_storage: dict[int, int], of_call: dict[tuple[int, int], int]) -> Op:
        op = self._old.ops[index]
        return replace(
            op,
            call=None if op.call is None else of_call.get((op.call, k)),
            origin=None if op.origin is None else self._at(op.origin, k),
            reads=_mapped(op.reads, of_storage),
            writes=_mapped(op.writes, of_storage),
        )

    def _function(
        self, function: FunctionCall, k: int, of_storage: dict[int, int], of_call: dict[tuple[int, int], int]
    ) -> FunctionCall | None:
        call = of_call.get((function.call, k))
        if call is None:
            return None
        start, end = self._at(function.start, k), self._until(function.end, k)
        return replace(function, call=call, start=min(start, end), end=end, outputs=_mapped(function.outputs, of_storage))

    def _saved(self, slot: SavedTensor, k: int, of_storage: dict[int, int], of_call: dict[tuple[int, int], int]) -> SavedTensor:
        part = self._of.part_of(slot.position - 1)  # also where it was saved outside of any module, by the loss
        released = self._until(slot.released, k)
        if part is not None:
            released = max(released, self._late.get(Action(WEIGHTS, part, k), 0))
        return replace(
            slot,
            storage=of_storage[slot.storage],
            call=None if slot.call is None else of_call.get((slot.call, k)),
            position=self._until(slot.position, k),
            used=None if slot.used is None else self._at(slot.used, k),
            released=released,
        )

    def _sent(self, place: _Place) -> Iterator[Storage]:
        """What a send holds after the backward of its micro-batch."""
        for part, call in enumerate(self._of.call_of_part):
            over = [self._over[Action(BACKWARD, part, k)] for k in range(self._count)]
            results, inputs = (self._bytes(storages) for storages in (self._old.calls[call].outputs, self._old.calls[call].inputs))
            if not place.has_first(part):
                later = [*over[1:], self.over] if place.schedule == "1f1b" else [self.over] * self._count
                yield from (_held(inputs, *span) for span in zip(over, later, strict=True))
            if not place.has_last(part, self._of.parts):
                yield from (_held(results, *span) for span in self._results_sent(place, over))

    def _results_sent(self, place: _Place, over: list[int]) -> list[tuple[int, int]]:
        """From when to when the results of which micro-batches are held by their sends alone."""
        if place.schedule != "1f1b":
            return [(end, self.over) for end in over]
        ahead = min(place.ranks - place.rank, self._count)
        return [(over[ahead - 2], over[self._count - ahead])] if ahead > 1 else []

    def _bytes(self, storages: Sequence[int]) -> int:
        return sum(self._old.storages[index].bytes for index in storages)


def _held(size: int, start: int, end: int) -> Storage:
    return Storage(size, Category.TEMPORARY, start, max(start, end), False)


def _mapped(storages: tuple[int, ...], places: dict[int, int]) -> tuple[int, ...]:
    return tuple(places[index] for index in storages)
