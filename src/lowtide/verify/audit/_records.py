"""What an audit found, as values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

_MOST_SHOWN = 4


class Kind(str, Enum):
    """What a region does besides computing a result from its inputs."""

    RANDOM = "random source"
    BUFFER = "buffer changed"
    ATTRIBUTE = "attribute changed"
    GLOBAL = "global changed"
    AMBIENT = "ambient state read"
    INPUT = "input mutated"
    COLLECTIVE = "collective"
    DEVICE = "device move"
    NONDETERMINISTIC = "nondeterministic op"
    CONTROL_FLOW = "data-dependent control flow"
    SIDE_EFFECT = "side effect"
    REPLAY = "replay differs"


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing that a region does.

    Attributes:
        kind: of what sort.
        what: which generator, buffer, op, line, …
        handled: its replay is right all the same; else it is a risk.
        how: how it is handled, or what to do.
    """

    kind: Kind
    what: str
    handled: bool
    how: str


@dataclass(frozen=True, slots=True)
class RegionAudit:
    """One region.

    Attributes:
        region: its name: a module's path, or a function's name.
        calls: how often it was called, by the process that called it most.
        ways: in how many ways those went, by the ops that they ran.
        observations: risks first.
    """

    region: str
    calls: int
    ways: int
    observations: tuple[Observation, ...]

    @property
    def risks(self) -> tuple[Observation, ...]:
        """What is not handled."""
        return tuple(o for o in self.observations if not o.handled)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """All regions of a step.

    Attributes:
        regions: in the order in which they were first called, with what any process observed of them.
        batches: how many steps were watched.
        ranks: how many risks each process found, where there are several.
    """

    regions: tuple[RegionAudit, ...]
    batches: int
    ranks: tuple[int, ...] = ()

    @property
    def risks(self) -> tuple[tuple[str, Observation], ...]:
        """What is not handled, with the region that does it."""
        return tuple((region.region, risk) for region in self.regions for risk in region.risks)

    def report(self) -> str:
        """What was found, a line for each region and kind, risks marked."""
        lines = [line for region in self.regions for line in _lines(region)]
        lines += [f"rank {rank}: {risks} risks" for rank, risks in enumerate(self.ranks)]
        return "\n".join(lines) or "no region does anything but compute"


def report_of(every: list[tuple[RegionAudit, ...]], batches: int) -> AuditReport:
    """One report on what each process observed, by rank."""
    found: dict[str, list[RegionAudit]] = {}
    for region in (region for regions in every for region in regions):
        found.setdefault(region.region, []).append(region)
    ranks = tuple(sum(len(region.risks) for region in regions) for regions in every) if len(every) > 1 else ()
    return AuditReport(tuple(map(_together, found.values())), batches, ranks)


def _together(parts: list[RegionAudit]) -> RegionAudit:
    seen = dict.fromkeys(o for part in parts for o in part.observations)
    calls, ways = max(part.calls for part in parts), max(part.ways for part in parts)
    return RegionAudit(parts[0].region, calls, ways, tuple(sorted(seen, key=lambda o: o.handled)))


def _lines(region: RegionAudit) -> Iterator[str]:
    groups: dict[tuple[Kind, bool, str], list[str]] = {}
    for o in region.observations:
        groups.setdefault((o.kind, o.handled, o.how), []).append(o.what)
    for (kind, handled, how), found in groups.items():
        more = f" and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        what = ", ".join(found[:_MOST_SHOWN]) + more
        yield f"{region.region}: {kind.value}: {what}: {'handled: ' if handled else 'RISK: '}{how}"
