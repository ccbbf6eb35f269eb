"""Plain counting: an executor that walks moment by moment with sets, and every set of regions tried in turn.

It is written from the rules in words (see the docstrings of ``simulate`` and ``Replay``) and shares no code with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from lowtide.errors import PlanError
from lowtide.plan import KeptCall, PlannedRegion
from lowtide.plan._functions import TYPE, with_function_calls
from lowtide.plan._index import TraceIndex
from lowtide.plan._overhead import ENGINE
from lowtide.plan._simulate import run
from lowtide.records import FunctionCall, Phase, StepTrace

NOTHING: set[int] = set()


def inside(trace: StepTrace, call: int | None, outer: set[int]) -> bool:
    while call is not None:
        if call in outer:
            return True
        call = trace.calls[call].parent
    return False


def follows(trace: StepTrace, call: int, path: str, stops: set[int] = NOTHING) -> int | None:
    """The call of a path that is entered with nothing but calls around it, or of functions, entered since ``call`` returned.

    No function among ``stops`` is passed over.
    """
    after = call + 1
    while after < len(trace.calls) and inside(trace, after, {call}):
        after += 1
    while after < len(trace.calls) and trace.calls[after].path != path:
        is_around = after + 1 < len(trace.calls) and trace.calls[after + 1].parent == after
        if after in stops or not (is_around or trace.calls[after].type == TYPE):
            return None
        after += 1
    return after if after < len(trace.calls) else None


def worth_it(trace: StepTrace) -> set[int]:
    """Calls of functions that are a member of regions that solvers try: they make as much that is saved as they are given that is not."""
    saved = {slot.storage for slot in trace.saved}
    made = {s: storage for s, storage in enumerate(trace.storages) if not storage.resident}
    least = 0.002 * sum(storage.bytes for s, storage in made.items() if s in saved)
    found = set()
    for call in trace.calls:
        own = sum(storage.bytes for s, storage in made.items() if call.start <= storage.born < call.end and s in saved)
        given = sum(made[s].bytes for s in call.inputs if s in made and s not in saved)
        if call.type == TYPE and own >= max(given, least):
            found.add(call.path)
    return {c for c, call in enumerate(trace.calls) if call.path in found}


def groups(trace: StepTrace, paths: tuple[str, ...]) -> list[list[int]]:
    """Occurrences of a region: calls one right after the other, each given what one before it made, and members by themselves."""
    found = []
    for first, call in enumerate(trace.calls):
        run: list[int | None] = [first] if call.path == paths[0] else [None]
        for path in paths[1:]:
            here = None if run[-1] is None else follows(trace, run[-1], path)
            made = {s for c in run if c is not None for s in trace.calls[c].outputs}
            run.append(here if here is not None and made & set(trace.calls[here].inputs) else None)
        if None not in run:
            found.append(run)
    in_run = {c for run in found for c in run}
    found += [[c] for c, call in enumerate(trace.calls) if call.path in paths and c not in in_run]
    calls = {c for group in found for c in group}
    return sorted(g for g in found if not inside(trace, trace.calls[g[0]].parent, calls))


def named_calls(trace: StepTrace, calls: list[int]) -> dict[KeptCall, FunctionCall]:
    """Calls of functions in an occurrence by the names that plans give them."""
    found = {}
    for member in calls:
        seen: list[str] = []
        for f in trace.functions:
            if inside(trace, f.call, {member}):
                path = trace.calls[f.call].path
                if sum(call.path == path for call in trace.calls) == 1:
                    found[KeptCall(path, f.function, seen.count(f.function))] = f
                seen.append(f.function)
    # What a member hands to the next is made again.
    passed_on = {s for member in calls[:-1] for s in trace.calls[member].outputs}
    return {name: f for name, f in found.items() if not passed_on & set(f.outputs)}


def occurrence(trace: StepTrace, calls: list[int], kept: tuple[KeptCall, ...], first_saved: int | None = None) -> dict:
    members = set(calls)
    ops = [i for i, op in enumerate(trace.ops) if op.phase is Phase.FORWARD and inside(trace, op.call, members)]
    functions = [f for name, f in named_calls(trace, calls).items() if name in kept]
    ops = [i for i in ops if not any(f.start <= i < f.end for f in functions)]
    fresh = {s for s, storage in enumerate(trace.storages) if not storage.resident and storage.born in ops}
    slots = [j for j, s in enumerate(trace.saved) if inside(trace, s.call, members)][:first_saved]
    slots = [j for j in slots if trace.saved[j].storage in fresh]
    wanted = [trace.saved[j].used for j in slots if trace.saved[j].used is not None]
    gone = [u for j in slots if (u := trace.saved[j].used) is not None and trace.storages[trace.saved[j].storage].freed <= u]
    before = min(gone, default=None)
    dropped = []
    for j in slots:
        slot, freed = trace.saved[j], trace.storages[trace.saved[j].storage].freed
        never = slot.used is None
        alive_anyway = not never if before is None else freed > before or (not never and slot.used < before)
        saved_later = before is not None and slot.position > before
        if not alive_anyway and not saved_later:
            dropped.append(j)
    needed = [j for j in dropped if before is not None and trace.saved[j].used is not None]
    last = max([trace.saved[j].position for j in needed], default=0)
    run = [i for i in ops if before is not None and i < last and i < before]
    made: set[int] = set()
    held: set[int] = set()
    for c in calls:
        held |= set(trace.calls[c].inputs) - made
        made |= set(trace.calls[c].outputs)
    until = max([trace.saved[j].released for j in dropped], default=0)
    assert not wanted or before is None or before >= min(wanted)
    holds = [(s, until) for s in held if dropped]
    made_again = max((trace.storages[trace.saved[j].storage].born + 1 for j in needed), default=0)
    reach = 0 if before is None else min(before, max(last, made_again))
    holds += [(s, before + 1) for f in functions if f.start < reach for s in f.outputs]
    return {"ops": run, "before": before, "dropped": dropped, "needed": needed, "holds": holds, "kept": len(functions)}


def timeline(trace: StepTrace, regions: list[PlannedRegion]) -> list[tuple[str, int, int]]:
    """``(kind, op, bytes)`` of each moment."""
    trace = with_function_calls(trace)
    found = [occurrence(trace, g, region.kept, region.first_saved) for region in regions for g in groups(trace, region.paths)]
    dropped = {j for o in found for j in o["dropped"]}

    def alive(storage: int, at: int, *, gap: bool) -> bool:
        s = trace.storages[storage]
        if (s.born >= at if gap else s.born > at) and not s.resident:
            return False
        holds = [slot.released for j, slot in enumerate(trace.saved) if slot.storage == storage and j not in dropped]
        holds += [until for o in found for held, until in o["holds"] if held == storage]
        return at < max([s.freed, *holds])

    def original(at: int, *, gap: bool) -> int:
        return sum(s.bytes for i, s in enumerate(trace.storages) if alive(i, at, gap=gap))

    copies: list[tuple[int, int]] = []
    moments = []
    for i, op in enumerate(trace.ops):
        here = sorted((o for o in found if o["before"] == i), key=lambda o: min(j for j in o["needed"] if trace.saved[j].used == i))
        for o in here:
            new: list[tuple[int, int | None, int]] = []
            for r in o["ops"]:
                new += [
                    (s.bytes, max((trace.saved[j].released for j in o["needed"] if trace.saved[j].storage == k), default=None), s.freed)
                    for k, s in enumerate(trace.storages)
                    if s.born == r and not s.resident
                ]
                own = sum(size for size, kept, freed in new if kept is not None or freed > r)
                held = sum(size for size, until in copies if until > i)
                moments.append(("replay", r, original(i, gap=True) + held + own + trace.ops[r].workspace_bytes))
            copies += [(size, kept) for size, kept, _ in new if kept is not None]
        moments.append(("step", i, original(i, gap=False) + sum(size for size, until in copies if until > i) + op.workspace_bytes))
    return moments


def added_s(trace: StepTrace, regions: list[PlannedRegion]) -> float:
    """Time of the ops that run again, and of the engine: for each call of a region, its members, ops, what it drops, what it keeps."""
    trace, total = with_function_calls(trace), 0.0
    for region in regions:
        for group in groups(trace, region.paths):
            found = occurrence(trace, group, region.kept, region.first_saved)
            functions = sum(inside(trace, f.call, set(group)) for f in trace.functions) if region.kept else 0
            total += sum(trace.ops[r].seconds for r in found["ops"])
            member_s = ENGINE.long_member_s if any(trace.calls[c].type == TYPE for c in group) else ENGINE.member_s
            total += ENGINE.region_s + member_s * (len(group) - 1) + ENGINE.slot_s * len(found["dropped"])
            total += ENGINE.op_s * len(found["ops"])
            total += ENGINE.function_s * functions + ENGINE.kept_s * len(region.kept)
    return total


def all_regions(trace: StepTrace) -> list[tuple[str, ...]]:
    """Every module, every run of siblings, and every run of modules without others inside, useful or not; functions are like modules."""
    leaves = {c for c in range(len(trace.calls)) if all(other.parent != c for other in trace.calls)}
    tried = worth_it(trace)
    starts = [c for c, call in enumerate(trace.calls) if call.type != TYPE or c in tried]
    found = {(trace.calls[c].path,) for c in starts}
    growing = [[c] for c in starts]
    while growing:
        run = growing.pop()
        made = {s for c in run for s in trace.calls[c].outputs}
        callers = [trace.calls[c].parent for c in run if trace.calls[c].type == TYPE]
        for c, call in enumerate(trace.calls):
            blocks = [m for m in run if m not in leaves]
            # A run of one block may end in the first module of what follows.
            ended = bool(blocks) and run[-1] in leaves and trace.calls[run[-1]].parent != trace.calls[run[-2]].parent
            enters = blocks == run[-1:] and c in leaves and call.type != TYPE
            level = not ended and (call.parent == trace.calls[run[-1]].parent or leaves.issuperset(run) or enters)
            stays = all(inside(trace, c, {caller}) for caller in callers)
            if c in starts and level and stays and follows(trace, run[-1], call.path, tried) == c and made & set(call.inputs):
                found.add(tuple(trace.calls[m].path for m in [*run, c]))
                growing.append([*run, c])
    return sorted(r for r in found if len(set(r)) == len(r) and not any(nested((a,), (b,)) for a in r for b in r if a != b))


def all_kept(trace: StepTrace, paths: tuple[str, ...]) -> list[PlannedRegion]:
    """A region with every set of calls that it can keep, useful or not."""
    each = [set(named_calls(trace, group)) for group in groups(trace, paths)]
    common = sorted(set.intersection(*each)) if each else []
    sets = [chosen for n in range(len(common) + 1) for chosen in combinations(common, n)]
    return [PlannedRegion(paths, kept=chosen) for chosen in sets]


def all_ends(trace: StepTrace, paths: tuple[str, ...]) -> list[PlannedRegion]:
    """A region that drops the first of its saved tensors alone, with every number of them, useful or not."""
    counts = {sum(inside(trace, s.call, set(group)) for s in trace.saved) for group in groups(trace, paths)}
    return [PlannedRegion(paths, first_saved=n) for n in range(1, max(counts, default=0))]


def all_plans(
    trace: StepTrace, more: Sequence[PlannedRegion] = (), *, every_end: bool = True
) -> Iterator[tuple[list[PlannedRegion], int, float]]:
    """Every set of regions that may be together, with peak and time; those in ``more`` among them, and on request every end of each."""
    shown, index = with_function_calls(trace), TraceIndex(trace)

    def extend(chosen: list[PlannedRegion], rest: list[tuple[str, ...]]) -> Iterator[tuple[list[PlannedRegion], int, float]]:
        try:
            result = run(index, chosen)
        except PlanError:
            return
        yield chosen, result.peak_bytes, result.added_s
        for i, paths in enumerate(rest):
            if not any(nested(paths, other.paths) for other in chosen):
                ends = all_ends(shown, paths) if every_end else []
                for region in [*all_kept(shown, paths), *ends, *(r for r in more if r.paths == paths)]:
                    yield from extend([*chosen, region], rest[i + 1 :])

    yield from extend([], all_regions(shown))


def nested(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return any(a == b or not a or not b or a.startswith((b + ".", b + ":")) or b.startswith((a + ".", a + ":")) for a in one for b in other)
