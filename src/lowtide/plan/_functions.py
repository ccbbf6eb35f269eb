"""Calls of torch functions between modules, as calls that regions can have among their members.

What a module calls in its own forward between the modules inside it (a pooling, a concatenation, an activation) becomes a call of its own,
with a path that says which one it is: ``up.0:torch.nn.functional.silu[1]`` is the second call of ``silu`` in a call of ``up.0``. Those are
calls whose results are their own, or arguments that they write to and return; what only makes views stays with the module around.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.records import Call, FunctionCall, Phase, SavedTensor, StepTrace

TYPE = "function"
"""Of such calls, in place of the class of a module."""


@dataclass(frozen=True)
class FunctionPath:
    """Which call of a function.

    Attributes:
        caller: path of the module that makes it.
        function: qualified name.
        index: calls of the same function before it in the call of that module, those in modules inside included.
    """

    caller: str
    function: str
    index: int

    def __str__(self) -> str:
        return f"{self.caller}:{self.function}[{self.index}]"

    @staticmethod
    def read(path: str) -> FunctionPath | None:
        """From its text; ``None`` where that is the path of a module.

        >>> FunctionPath.read("up.0:torch.nn.functional.silu[1]")
        FunctionPath(caller='up.0', function='torch.nn.functional.silu', index=1)
        >>> FunctionPath.read("up.0")
        """
        caller, colon, rest = path.rpartition(":")
        function, bracket, number = rest.removesuffix("]").rpartition("[")
        if not (colon and bracket and rest.endswith("]") and number.isdecimal()):
            return None
        return FunctionPath(caller, function, int(number))


def with_function_calls(trace: StepTrace, paths: Collection[str] | None = None) -> StepTrace:
    """The same step with calls of functions between modules among its calls: all, or those of some paths."""
    found = [(path, trace.functions[i]) for i, path in _between_modules(trace) if paths is None or str(path) in paths]
    return _Inserted(trace, found).trace() if found else trace


def without_function_calls(trace: StepTrace, paths: Collection[str]) -> StepTrace:
    """The same step with some of those calls left to the modules that make them."""
    left = {i for i, path in _between_modules(trace) if str(path) in paths}
    return replace(trace, functions=tuple(replace(f, outputs=()) if i in left else f for i, f in enumerate(trace.functions)))


def _between_modules(trace: StepTrace) -> Iterator[tuple[int, FunctionPath]]:
    callers = {call.parent for call in trace.calls}
    counts: Counter[tuple[int, str]] = Counter()
    for i, function in enumerate(trace.functions):
        index = counts[function.call, function.function]
        around: int | None = function.call
        while around is not None:
            counts[around, function.function] += 1
            around = trace.calls[around].parent
        if function.call in callers and _has_own_results(trace, function):
            yield i, FunctionPath(trace.calls[function.call].path, function.function, index)


def _has_own_results(trace: StepTrace, function: FunctionCall) -> bool:
    """Whether its results are its own, or what it writes to; and all of it is of the module that calls it."""
    ops = trace.ops[function.start : function.end]
    if not function.outputs or not all(op.call == function.call and op.phase is Phase.FORWARD for op in ops):
        return False
    written = {storage for op in ops for storage in op.writes}
    made = {s for s in {*written, *function.outputs} if _is_born_in(trace, s, function)}
    return all(s in made or s in written for s in function.outputs) and written <= made | set(function.outputs)


def _is_born_in(trace: StepTrace, storage: int, function: FunctionCall) -> bool:
    record = trace.storages[storage]
    return not record.resident and function.start <= record.born < function.end


class _Inserted:
    """A trace with more calls: each where it was entered, among those of its module.

    Args:
        old: the trace.
        found: the calls, in order.
    """

    def __init__(self, old: StepTrace, found: Sequence[tuple[FunctionPath, FunctionCall]]) -> None:
        self._old, self._found = old, found
        after = _stops(old.calls)
        at: dict[int, list[int]] = {}
        for k, (_, function) in enumerate(found):
            at.setdefault(_place(old.calls, after, function), []).append(k)
        self._order: list[tuple[int | None, int]] = []  # old call, or None and the number of a function
        for call in range(len(old.calls) + 1):
            self._order += [(None, k) for k in at.get(call, ())]
            self._order += [(call, -1)] if call < len(old.calls) else []
        self._new = {call: i for i, (call, _) in enumerate(self._order) if call is not None}
        self._new_of = {k: i for i, (call, k) in enumerate(self._order) if call is None}

    def trace(self) -> StepTrace:
        """The trace with all of them."""
        old, functions = self._old, [function for _, function in self._found]
        of_op = {op: self._new_of[k] for k, function in enumerate(functions) for op in range(function.start, function.end)}
        return replace(
            old,
            ops=tuple(replace(op, call=of_op.get(i, self._renumbered(op.call))) for i, op in enumerate(old.ops)),
            saved=tuple(self._saved()),
            calls=tuple(self._call_of(k) if call is None else self._moved(old.calls[call]) for call, k in self._order),
            functions=tuple(replace(function, call=self._new[function.call]) for function in old.functions),
            gathers=tuple(replace(gather, call=self._new[gather.call]) for gather in old.gathers),
        )

    def _renumbered(self, call: int | None) -> int | None:
        return None if call is None else self._new[call]

    def _moved(self, call: Call) -> Call:
        return replace(call, parent=self._renumbered(call.parent))

    def _call_of(self, k: int) -> Call:
        path, function = self._found[k]
        reads = {storage for op in self._old.ops[function.start : function.end] for storage in op.reads}
        inputs = tuple(sorted(storage for storage in reads if not _is_born_in(self._old, storage, function)))
        replayable = self._old.calls[function.call].replayable
        return Call(str(path), TYPE, self._new[function.call], function.start, function.end, inputs, function.outputs, replayable)

    def _saved(self) -> Iterator[SavedTensor]:
        """The saved tensors: what was saved in the course of such a call is of it."""
        of_caller: dict[int, list[int]] = {}
        for k, (_, function) in enumerate(self._found):
            of_caller.setdefault(function.call, []).append(k)
        starts = {caller: [self._found[k][1].start for k in of] for caller, of in of_caller.items()}
        for slot in self._old.saved:
            call = self._renumbered(slot.call)
            if slot.call in of_caller:
                # One that meets the next is the last that began before it.
                last = (bisect_left if slot.at_end else bisect_right)(starts[slot.call], slot.position) - 1
                k = of_caller[slot.call][last]
                if last >= 0 and slot.position < self._found[k][1].end + slot.at_end:
                    call = self._new_of[k]
            yield replace(slot, call=call)


def _stops(calls: Sequence[Call]) -> list[int]:
    """For each call the first after those inside it."""
    stops = list(range(1, len(calls) + 1))
    for i in range(len(calls) - 1, -1, -1):
        parent = calls[i].parent
        if parent is not None:
            stops[parent] = max(stops[parent], stops[i])
    return stops


def _place(calls: Sequence[Call], stops: Sequence[int], function: FunctionCall) -> int:
    """The call in front of which it goes: the first inside its module that was not over when it began."""
    place = function.call + 1
    while place < stops[function.call] and calls[place].end <= function.start and calls[place].start < function.end:
        place = stops[place]
    return place
