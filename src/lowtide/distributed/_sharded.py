"""What a rank holds under ``fully_shard``: the trace of a step on one process with what is gathered and reduced put in.

A rank has a share of everything. A unit's parameters are gathered for its forward and for its backward (Rajbhandari et al. 2020, stage 3;
Zhao et al. 2023), or once for both (stage 2); its gradients are whole until its backward is over, and then are reduced and cut up. The
collectives are ops of the trace, each in two parts, for what is alive differs between them:

    gather     a flat buffer of the unit's size is filled; in forward the buffer of the unit before is still there
    copy out   parameters are made from it; in forward the buffer stays until the next one is copied out, in backward it goes
    copy in    gradients are copied into a flat buffer, and go; the buffer stays until the gradients of the next unit are copied in
    reduce     the rank's share of them is made

Backward gathers the unit that comes next when it begins with one.

A replay of a region gathers the units inside it that are not whole. They stay whole for their own backward, which then gathers nothing:
only what backward never gathers is gathered once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.distributed._gather_cost import GatherCost
from lowtide.distributed._insert import Inserted, Longer
from lowtide.errors import InvalidInputError
from lowtide.records import Category, Gather, Phase, StepTrace, Storage

ROOT = None
"""In place of the call of a unit: what is in no unit."""
GATHER, COPY_OUT, COPY_IN, REDUCE = "fsdp::all_gather", "fsdp::copy_out", "fsdp::copy_in", "fsdp::reduce_scatter"


@dataclass(frozen=True, slots=True)
class _Use:
    """A call of a unit: the ops of its forward and of its backward, ``start <= op < end`` each; both the same where it has none."""

    call: int | None
    forward: tuple[int, int]
    backward: tuple[int, int]

    @property
    def goes_back(self) -> bool:
        return self.backward[0] < self.backward[1]


def sharded(
    trace: StepTrace, ranks: int, units: Sequence[str], forward_only: Sequence[str], gather: GatherCost | None, *, keeps_whole: bool
) -> StepTrace:
    """Rewrite the trace.

    Args:
        trace: of a process alone.
        ranks: how many share the state.
        units: paths of what is sharded one by one.
        forward_only: those that backward does not gather.
        gather: what a gather takes.
        keeps_whole: parameters stay whole from forward to backward.

    Raises:
        InvalidInputError: a unit that the step never calls.
    """
    uses = _Uses(trace, units)
    return _Sharded(uses, ranks, frozenset(forward_only), gather or GatherCost(0.0, 0.0), keeps_whole).trace()


class _Uses:
    """Which ops, parameters and gradients are of which call of which unit."""

    def __init__(self, old: StepTrace, units: Sequence[str]) -> None:
        self.old = old
        self.unit_of_call = _unit_of_call(old, units)
        self.backward_end = 1 + max((i for i, op in enumerate(old.ops) if op.phase is Phase.BACKWARD), default=0)
        self.root = _Use(ROOT, *self._of_model())
        calls = [index for index, call in enumerate(old.calls) if call.path in units]
        self.all = [self.root, *sorted(map(self._use, calls), key=lambda use: use.forward)]
        for unit in set(units) - {old.calls[call].path for call in calls}:
            raise InvalidInputError(f"the step never goes through {unit!r}, which is to be sharded: name modules that it calls")
        self._owner = dict(self._owners())
        self.bytes = self._bytes()

    def _of_model(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Ops of the model's own forward and backward, without those of the loss."""
        outer = [call for call in self.old.calls if call.parent is None]
        back = (i for i, op in enumerate(self.old.ops) if op.phase is Phase.BACKWARD and op.call is not None)
        forward = min((c.start for c in outer), default=0), max((c.end for c in outer), default=0)
        return forward, (next(back, self.backward_end), self.backward_end)

    def unit_of(self, op: int) -> int | None:
        """The call of a unit that an op ran in, for backward the one that it goes back through."""
        call = self.old.ops[op].call
        return ROOT if call is None else self.unit_of_call[call]

    def path(self, call: int | None) -> str:
        return "" if call is None else self.old.calls[call].path

    def of_gradient(self, storage: Storage) -> _Use:
        unit = self.unit_of(storage.born)
        return next(use for use in self.all if use.call == unit)

    def _use(self, call: int) -> _Use:
        own = [i for i in range(len(self.old.ops)) if self.unit_of(i) == call]
        back = [i for i in own if self.old.ops[i].phase is Phase.BACKWARD]
        forward = self.old.calls[call].start, self.old.calls[call].end
        return _Use(call, forward, (back[0], back[-1] + 1) if back else (self.backward_end, self.backward_end))

    def _owners(self) -> Iterator[tuple[int, str]]:
        """Of each parameter's storage, the unit whose forward reads it first."""
        seen: set[int] = set()
        for index, op in enumerate(self.old.ops):
            if op.phase is Phase.FORWARD:
                yield from ((read, self.path(self.unit_of(index))) for read in op.reads if read not in seen)
                seen.update(op.reads)

    def _bytes(self) -> Counter[str]:
        """Of each unit's parameters."""
        found: Counter[str] = Counter()
        for index, storage in enumerate(self.old.storages):
            if is_parameter(storage):
                found[self._owner.get(index, "")] += storage.bytes
        return found

    def reduced_bytes(self, use: _Use) -> int:
        """Of the gradients that the backward of a use makes."""
        found = (s.bytes for s in self.old.storages if is_new_gradient(s) and self.of_gradient(s) == use)
        return min(sum(found), self.bytes[self.path(use.call)])


def is_parameter(storage: Storage) -> bool:
    return storage.category is Category.PARAMETER and storage.resident


def is_new_gradient(storage: Storage) -> bool:
    return storage.category is Category.GRADIENT and not storage.resident


@dataclass(slots=True)
class _Life:
    """A storage that is put in, in terms of the ops that are put in: ``None`` for the end of backward."""

    bytes: int
    category: Category
    born: int
    freed: int | None


class _Sharded:
    """One rewriting. Ops are put in first, then what lives between them: an inserted op is meant by its place in ``_inserted``."""

    def __init__(self, uses: _Uses, ranks: int, forward_only: frozenset[str], gather: GatherCost, keeps_whole: bool) -> None:
        self._uses, self._ranks, self._gather_cost = uses, ranks, gather
        self._old, self._keeps_whole = uses.old, keeps_whole
        self._back = sorted((u for u in uses.all if u.goes_back and u.call is not ROOT), key=lambda use: use.backward)
        self._gathered_back = [] if keeps_whole else [u for u in self._back if uses.path(u.call) not in forward_only]
        self._inserted: list[Inserted] = []
        self._gathers = {use: self._insert(GATHER, Phase.FORWARD, use.forward[0], use.call) for use in uses.all}
        self._copies = {use: self._insert(COPY_OUT, Phase.FORWARD, use.forward[0], use.call) for use in uses.all}
        self._ahead, self._copies_back = self._insert_backward()
        self._reduced = [use for use in (*self._back, uses.root) if uses.reduced_bytes(use)]
        self._copied_in, self._reduces = {}, {}
        for use in self._reduced:
            self._copied_in[use] = self._insert(COPY_IN, Phase.BACKWARD, use.backward[1])
            self._reduces[use] = self._insert(REDUCE, Phase.BACKWARD, use.backward[1])
        self._longer = Longer(self._old, self._inserted)

    def _insert(self, name: str, phase: Phase, at: int, call: int | None = None) -> int:
        self._inserted.append(Inserted(name, phase, name in (GATHER, REDUCE), at, call))
        return len(self._inserted) - 1

    def _insert_backward(self) -> tuple[dict[_Use, int], dict[_Use, int]]:
        """Gathers of backward, each when the backward of the unit before begins, and where parameters are copied out of them."""
        gathers, copies = {}, {}
        begin = self._uses.root.backward[0]
        for use in self._gathered_back:
            gathers[use] = self._insert(GATHER, Phase.BACKWARD, begin)
            copies[use] = self._insert(COPY_OUT, Phase.BACKWARD, use.backward[0])
            begin = use.backward[0]
        behind = self._behind()
        if behind is not None:
            gathers[behind] = self._insert(GATHER, Phase.BACKWARD, begin)
        return gathers, copies

    def _behind(self) -> _Use | None:
        """What backward gathers ahead and never comes to: the unit whose forward came before that of the last one."""
        first = min((use.forward for use in self._gathered_back), default=None)
        before = [u for u in self._uses.all if u.call is not ROOT and not u.goes_back and first is not None and u.forward < first]
        return before[-1] if before else None

    def trace(self) -> StepTrace:
        """Rewritten."""
        new = self._longer.trace
        storages = [self._share(old, s) for old, s in zip(self._old.storages, new.storages, strict=True)]
        whole = {use: len(storages) + i for i, use in enumerate(self._uses.all)}
        lives = [*map(self._whole, self._uses.all), *self._whole_back(), *self._flat(), *self._reduce_buffers()]
        return replace(
            new, storages=(*storages, *map(self._storage, lives), *self._shards()), gathers=tuple(sorted(self._priced(whole), key=_call))
        )

    def _place(self, inserted: int) -> int:
        return self._longer.places[inserted]

    @property
    def _end(self) -> int:
        """When backward is over, and the last gradients are reduced."""
        last = [self._place(self._reduces[use]) for use in self._reduced[-1:]]
        return max([self._longer.until(self._uses.backward_end), *(place + 1 for place in last)])

    def _storage(self, life: _Life) -> Storage:
        return Storage(life.bytes, life.category, self._place(life.born), self._end if life.freed is None else life.freed, False)

    def _share(self, old: Storage, new: Storage) -> Storage:
        """A storage as the rank has it: a share of what stays, gradients until they have been copied."""
        if is_parameter(old) or old.category is Category.OPTIMIZER or (old.category is Category.GRADIENT and old.resident):
            return replace(new, bytes=self._part(old.bytes))
        if is_new_gradient(old):
            use = self._uses.of_gradient(old)
            return replace(new, freed=min(max(self._place(self._reduces[use]), new.born + 1), new.freed)) if use in self._reduces else new
        is_update = not old.resident and self._old.ops[old.born].phase is Phase.OPTIMIZER
        return replace(new, bytes=self._part(old.bytes)) if is_update else new

    def _part(self, size: int) -> int:
        return -(-size // self._ranks)

    def _size(self, use: _Use) -> int:
        return self._uses.bytes[self._uses.path(use.call)]

    def _whole(self, use: _Use) -> _Life:
        """Parameters as forward gathers them."""
        if use.call is ROOT or (self._keeps_whole and not use.goes_back):
            freed = self._longer.until(self._uses.backward_end)
        else:
            freed = self._longer.until(use.backward[1] if self._keeps_whole else use.forward[1])
        return _Life(self._size(use), Category.PARAMETER, self._copies[use], freed)

    def _whole_back(self) -> Iterator[_Life]:
        for use, copied in self._copies_back.items():
            yield _Life(self._size(use), Category.PARAMETER, copied, self._longer.until(use.backward[1]))

    def _flat(self) -> Iterator[_Life]:
        """Buffers of gathers."""
        forward = self._longer.until(self._uses.root.forward[1])
        ends = [*(self._place(self._copies[following]) for following in self._uses.all[1:]), forward]
        for use, freed in zip(self._uses.all, ends, strict=True):
            yield self._temporary(use, self._gathers[use], freed)
        for use, gathered in self._ahead.items():
            copied = self._copies_back.get(use)
            yield self._temporary(use, gathered, None if copied is None else self._place(copied) + 1)

    def _temporary(self, use: _Use, born: int, freed: int | None) -> _Life:
        return _Life(self._size(use), Category.TEMPORARY, born, freed)

    def _reduce_buffers(self) -> Iterator[_Life]:
        ends = [*(self._place(self._copied_in[following]) for following in self._reduced[1:]), None]
        for use, freed in zip(self._reduced, ends, strict=False):
            yield _Life(self._uses.reduced_bytes(use), Category.TEMPORARY, self._copied_in[use], freed)

    def _shards(self) -> Iterator[Storage]:
        """Shares of gradients, from when they are reduced on, as long as the whole ones lived."""
        for old, new in zip(self._old.storages, self._longer.trace.storages, strict=True):
            if is_new_gradient(old):
                use = self._uses.of_gradient(old)
                if use in self._reduces and new.freed > self._place(self._reduces[use]):
                    yield Storage(self._part(old.bytes), Category.GRADIENT, self._place(self._reduces[use]), new.freed, False)

    def _priced(self, whole: dict[_Use, int]) -> Iterator[Gather]:
        """Of each call of a unit what it takes to gather it."""
        for use in self._uses.all:
            if use.call is not ROOT:
                size = self._size(use)
                yield Gather(use.call, (whole[use],), self._gather_cost.seconds(size), *self._whole_while(use))

    def _whole_while(self, use: _Use) -> tuple[int, int]:
        if self._keeps_whole:
            return self._place(self._copies[use]), self._longer.until(use.backward[1]) if use.goes_back else self._end
        gathered = self._copies_back.get(use, self._ahead.get(use))
        if gathered is None:
            return self._end, self._end
        return self._place(gathered), self._longer.until(use.backward[1]) if use.goes_back else self._end


def _call(gather: Gather) -> int:
    return gather.call


def _unit_of_call(trace: StepTrace, units: Sequence[str]) -> list[int | None]:
    """Of each call, the innermost call of a unit around it."""
    found: list[int | None] = []
    for index, call in enumerate(trace.calls):  # in order of entry: the one around it comes first
        found.append(index if call.path in units else ROOT if call.parent is None else found[call.parent])
    return found
