"""Plain counting: an executor that walks moment by moment with sets, and every set of regions tried in turn.

It is written from the rules in words (see the docstrings of ``simulate`` and ``Replay``) and shares no code with them.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.errors import PlanError
from lowtide.plan import PlannedRegion, simulate
from lowtide.records import Phase, StepTrace


def inside(trace: StepTrace, call: int | None, outer: set[int]) -> bool:
    while call is not None:
        if call in outer:
            return True
        call = trace.calls[call].parent
    return False


def groups(trace: StepTrace, paths: tuple[str, ...]) -> list[list[int]]:
    """Occurrences of a region: runs of siblings, and lone members; none inside another."""
    by_parent: dict[int | None, list[int]] = {}
    for i, call in enumerate(trace.calls):
        by_parent.setdefault(call.parent, []).append(i)
    found = []
    for siblings in by_parent.values():
        at = 0
        while at < len(siblings):
            run = siblings[at : at + len(paths)]
            if tuple(trace.calls[c].path for c in run) == paths:
                found.append(run)
                at += len(paths)
            else:
                if trace.calls[siblings[at]].path in paths:
                    found.append([siblings[at]])
                at += 1
    calls = {c for group in found for c in group}
    return [g for g in found if not inside(trace, trace.calls[g[0]].parent, calls)]


def occurrence(trace: StepTrace, calls: list[int]) -> dict:
    members = set(calls)
    ops = [i for i, op in enumerate(trace.ops) if op.phase is Phase.FORWARD and inside(trace, op.call, members)]
    fresh = {s for s, storage in enumerate(trace.storages) if not storage.resident and storage.born in ops}
    slots = [j for j, s in enumerate(trace.saved) if inside(trace, s.call, members) and s.storage in fresh]
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
    return {"ops": run, "before": before, "dropped": dropped, "needed": needed, "held": held if dropped else set(), "until": until}


def timeline(trace: StepTrace, regions: list[tuple[str, ...]]) -> list[tuple[str, int, int]]:
    """``(kind, op, bytes)`` of each moment."""
    found = [occurrence(trace, g) for paths in regions for g in groups(trace, paths)]
    dropped = {j for o in found for j in o["dropped"]}

    def alive(storage: int, at: int, *, gap: bool) -> bool:
        s = trace.storages[storage]
        if (s.born >= at if gap else s.born > at) and not s.resident:
            return False
        holds = [slot.released for j, slot in enumerate(trace.saved) if slot.storage == storage and j not in dropped]
        holds += [o["until"] for o in found if storage in o["held"]]
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


def replay_s(trace: StepTrace, regions: list[tuple[str, ...]]) -> float:
    return sum(trace.ops[r].seconds for paths in regions for g in groups(trace, paths) for r in occurrence(trace, g)["ops"])


def all_regions(trace: StepTrace) -> list[tuple[str, ...]]:
    """Every module and every run of siblings, useful or not."""
    by_parent: dict[int | None, list[str]] = {}
    for call in trace.calls:
        by_parent.setdefault(call.parent, []).append(call.path)
    runs = {tuple(s[i:j]) for s in by_parent.values() for i in range(len(s)) for j in range(i + 1, len(s) + 1)}
    return sorted(r for r in runs if len(set(r)) == len(r))


def all_plans(trace: StepTrace) -> Iterator[tuple[list[tuple[str, ...]], int, float]]:
    """Every set of regions that may be together, with peak and replay time."""

    def extend(chosen: list[tuple[str, ...]], rest: list[tuple[str, ...]]) -> Iterator[tuple[list[tuple[str, ...]], int, float]]:
        try:
            result = simulate(trace, [PlannedRegion(paths) for paths in chosen])
        except PlanError:
            return
        yield chosen, result.peak_bytes, result.replay_s
        for i, paths in enumerate(rest):
            if not any(nested(paths, other) for other in chosen):
                yield from extend([*chosen, paths], rest[i + 1 :])

    yield from extend([], all_regions(trace))


def nested(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    return any(a == b or not a or not b or a.startswith(b + ".") or b.startswith(a + ".") for a in one for b in other)
