"""What was decided, region by region, so that every module of the model is in exactly one row.

A row is a region of the plan, or a module outside the plan whose tensors are kept. Modules that only hold
regions of the plan are opened up; what they save themselves has a row of its own.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.plan.reading import with_function_calls
from lowtide.records import Call, Decision, SavedTensor, StepTrace
from lowtide.report._timeline import region_name

if TYPE_CHECKING:
    from lowtide.plan import Plan, Simulation


@dataclass(frozen=True)
class RegionRow:
    """One line of the table of decisions.

    Attributes:
        paths: module paths; several for a segment; none for what the step does outside any module.
        name: the paths in one text.
        type: class name of the module; for a segment those of its members.
        decision: what becomes of its saved tensors.
        saved_bytes: storages that autograd saved here and nowhere before.
        freed_bytes: the part of them that a replay lets go of after forward; 0 where they are kept.
        replay_s: predicted seconds of its replays.
    """

    paths: tuple[str, ...]
    name: str
    type: str
    decision: Decision
    saved_bytes: int
    freed_bytes: int
    replay_s: float


@dataclass(frozen=True)
class _Row:
    """Identity of a row: its paths, and whether it is only what a module does outside its children."""

    paths: tuple[str, ...]
    own: bool = False


_OUTSIDE = _Row(())


def decided(trace: StepTrace, plan: Plan, simulation: Simulation) -> tuple[RegionRow, ...]:
    """Every module's decision, in the order in which forward reached them.

    Args:
        trace: the step without the plan.
        plan: its decisions.
        simulation: the step as predicted with the plan, for replay times.
    """
    planned = {region.paths: region.decision for region in plan.regions}
    trace = with_function_calls(trace, {path for paths in planned for path in paths})
    owners = _owners(trace.calls, {path: paths for paths in planned for path in paths})
    saved, freed = _bytes(trace, owners, {paths for paths, decision in planned.items() if decision is not Decision.KEEP})
    replay_s = _replay_seconds(simulation)
    types = _types(trace.calls, owners)
    rows = [row for row in dict.fromkeys((*owners, _OUTSIDE)) if row in saved or (row.paths in planned and not row.own)]
    return tuple(
        RegionRow(
            paths=row.paths,
            name=_name(row),
            type=types.get(row, ""),
            decision=Decision.KEEP if row.own else planned.get(row.paths, Decision.KEEP),
            saved_bytes=saved[row],
            freed_bytes=freed[row],
            replay_s=0.0 if row.own else replay_s.get(row.paths, 0.0),
        )
        for row in rows
    )


def _owners(calls: tuple[Call, ...], regions: dict[str, tuple[str, ...]]) -> list[_Row]:
    """The row of each call; calls come in order of entry, so a parent's row is known before its children's."""
    parents = {call.parent for call in calls}
    holds_region = _ancestors_of_regions(calls, regions)
    owners: list[_Row] = []
    for index, call in enumerate(calls):
        above = owners[call.parent] if call.parent is not None else None
        opened = index in holds_region or (call.parent is None and index in parents)
        if above is not None and not above.own:
            owners.append(above)
        elif call.path in regions:
            owners.append(_Row(regions[call.path]))
        else:
            owners.append(_Row((call.path,), own=opened))
    return owners


def _ancestors_of_regions(calls: tuple[Call, ...], regions: dict[str, tuple[str, ...]]) -> set[int]:
    found: set[int] = set()
    for call in calls:
        above = call.parent if call.path in regions else None
        while above is not None and above not in found:
            found.add(above)
            above = calls[above].parent
    return found


def _bytes(trace: StepTrace, owners: list[_Row], replayed: set[tuple[str, ...]]) -> tuple[defaultdict[_Row, int], defaultdict[_Row, int]]:
    """Saved and freed bytes of each row; a storage counts in the row that saved it first."""
    saved: defaultdict[_Row, int] = defaultdict(int)
    freed: defaultdict[_Row, int] = defaultdict(int)
    held = _held(trace, owners, replayed)
    seen: set[int] = set()
    for tensor in trace.saved:
        storage = trace.storages[tensor.storage]
        if storage.resident or tensor.storage in seen:
            continue
        seen.add(tensor.storage)
        row = owners[tensor.call] if tensor.call is not None else _OUTSIDE
        saved[row] += storage.bytes
        freed[row] += storage.bytes if tensor.storage not in held else 0
    return saved, freed


def _held(trace: StepTrace, owners: list[_Row], replayed: set[tuple[str, ...]]) -> set[int]:
    """Storages that stay until backward: some slot keeps them, or a replay needs them as its input."""
    starts = _starts(trace.calls, owners)
    in_replay = [row.paths in replayed and not row.own for row in owners]
    held = {
        tensor.storage
        for tensor in trace.saved
        if tensor.call is None or not in_replay[tensor.call] or not _is_dropped(tensor, trace, starts[tensor.call])
    }
    for index, call in enumerate(trace.calls):
        if in_replay[index]:
            held.update(storage for storage in call.inputs if trace.storages[storage].born < starts[index])
    return held


def _starts(calls: tuple[Call, ...], owners: list[_Row]) -> list[int]:
    """For each call, the op at which its region began, this time round: a shared module's region begins at each of its calls."""
    latest: dict[_Row, int] = {}
    starts: list[int] = []
    for call, row in zip(calls, owners, strict=True):
        nested = call.parent is not None and owners[call.parent] == row
        if not nested and call.path == row.paths[0]:
            latest[row] = call.start
        starts.append(latest.setdefault(row, call.start))
    return starts


def _is_dropped(tensor: SavedTensor, trace: StepTrace, region_start: int) -> bool:
    """A slot costs something only if its storage was made in the region and dies before backward wants it."""
    storage = trace.storages[tensor.storage]
    return storage.born >= region_start and tensor.used is not None and storage.freed <= tensor.used


def _types(calls: tuple[Call, ...], owners: list[_Row]) -> dict[_Row, str]:
    members: defaultdict[_Row, dict[str, str]] = defaultdict(dict)
    for call, row in zip(calls, owners, strict=True):
        if call.path in row.paths:
            members[row].setdefault(call.path, call.type)
    return {row: _summed_up(list(types.values())) for row, types in members.items()}


def _summed_up(types: list[str]) -> str:
    """One text for the types of a segment's members.

    >>> _summed_up(["Block"]), _summed_up(["Block", "Block"]), _summed_up(["Linear", "GELU", "Linear"])
    ('Block', '2 × Block', 'Linear, GELU, Linear')
    """
    if len(set(types)) == 1:
        return types[0] if len(types) == 1 else f"{len(types)} × {types[0]}"
    return ", ".join(types[:3]) + (f" and {len(types) - 3} more" if len(types) > 3 else "")


def _replay_seconds(simulation: Simulation) -> dict[tuple[str, ...], float]:
    seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for moment in simulation.moments:
        if moment.phase == "replay":
            seconds[moment.region] += moment.seconds
    return dict(seconds)


def _name(row: _Row) -> str:
    if not row.paths:
        return "outside any module"
    return f"{region_name(row.paths)}, own ops" if row.own else region_name(row.paths)
