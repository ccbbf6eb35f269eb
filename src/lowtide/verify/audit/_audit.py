"""``audit``: every region of a step, watched for a few batches."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.engine import Observer, in_replay, observed, watch_again
from lowtide.engine._facts import Facts, facts_of
from lowtide.engine._replay import where_saved
from lowtide.engine._tower import tower
from lowtide.errors import InvalidInputError, StepError
from lowtide.plan import Plan
from lowtide.policy import Policy
from lowtide.records import Decision
from lowtide.torch_compat import substituted
from lowtide.verify._ranks import Ranks
from lowtide.verify._regions import chosen
from lowtide.verify._runs import snapshot
from lowtide.verify.audit._advice import observation
from lowtide.verify.audit._onlooker import Onlooker, Seen
from lowtide.verify.audit._records import AuditReport, Kind, RegionAudit, report_of

_OURS = re.compile(r"(the replay of )?region '(?P<region>.*?)' (?P<text>.*)", re.DOTALL)
_FACTS = (
    (Kind.RANDOM, "random"),
    (Kind.BUFFER, "buffers"),
    (Kind.ATTRIBUTE, "attributes"),
    (Kind.INPUT, "inputs"),
    (Kind.AMBIENT, "ambient"),
)


def audit(
    model: nn.Module,
    step: Callable[[], object],
    *,
    plan: Plan | None = None,
    policy: Policy | str | Callable[..., Decision] | None = None,
    batches: int = 2,
    timeout_s: float = 300.0,
) -> AuditReport:
    """Say of every region of a step what it does besides computing: what of that replays get right, and what is a risk.

    What is looked for: random sources, buffers, attributes and globals that change, ambient state, inputs written to, collectives, moves
    between devices, ops that are not deterministic, control flow that depends on data, and whether the replay made what the forward had.

    Under ``torch.distributed`` every process calls this with its share of the step. All get the same report.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.
        plan, policy: which regions there are; without, as for ``verify``, those that the step has, or every block.
        batches: how many steps to watch. Ways that a region goes only for other data are seen if a step draws new data.
        timeout_s: with several processes, how long a collective of the step may wait for the others.

    Returns:
        The regions, each with what was observed, by any process. Model, optimizer and random state are as they were.

    Raises:
        InvalidInputError: ``batches`` is not above zero; both a plan and a policy; a parameter without values yet.
        StepError: no region ran.
        Exception: whatever the step raises.
    """
    if batches < 1 or (plan is not None and policy is not None):
        raise InvalidInputError(f"an audit watches one batch at least (found {batches}), under a plan or a policy but not both")
    ranks, state = Ranks(timeout_s), snapshot(model, step)
    try:
        with ranks.bounded():
            way = chosen(model, step, state, policy if plan is None else plan)
            report = report_of(ranks.gather(_watched(way, step, batches)), batches)
    finally:
        state.restore()
    if not report.regions:
        raise StepError("nothing was audited, for no region ran: a region runs when it is called while gradients are recorded")
    return report


def _watched(way: Callable[[], Any], step: Callable[[], object], batches: int) -> tuple[RegionAudit, ...]:
    with _warnings_kept() as warned, nondeterminism_warned():
        collector = _Collector(Onlooker(warned))
        with way(), substituted(), observed(collector), tower.watching(collector.onlooker):
            for _ in range(batches):
                step()
    for warning in warned:
        collector.add_warning(str(warning.message))
    return tuple(found.audit(name) for name, found in collector.regions.items())


@contextmanager
def _warnings_kept() -> Iterator[list[Any]]:
    """Warnings of regions become observations; all others are given when this is over."""
    with warnings.catch_warnings(record=True) as kept:
        warnings.simplefilter("always")
        yield kept
    for warning in kept:
        text = str(warning.message)
        if not _OURS.match(text) and "deterministic" not in text:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextmanager
def nondeterminism_warned() -> Iterator[None]:
    """While in this context, torch warns of ops that are not deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class _Found:
    """What is known of one region so far, or of several functions of one name; ``ways`` is by function."""

    def __init__(self) -> None:
        self.calls = 0
        self.ways: dict[int, set[int]] = {}
        self.seen: dict[Seen, str] = {}

    def add(self, facts: Facts) -> None:
        for kind, name in _FACTS:
            for what in getattr(facts, name):
                self.seen.setdefault((kind, what), "")

    def audit(self, name: str) -> RegionAudit:
        ways = max(map(len, self.ways.values()), default=0)
        if ways > 1:
            self.seen.setdefault((Kind.CONTROL_FLOW, f"{self.calls} calls went {ways} ways"), "")
        found = [observation(kind, what, how) for (kind, what), how in self.seen.items()]
        return RegionAudit(name, self.calls, ways, tuple(sorted(found, key=lambda o: o.handled)))


class _Collector(Observer):
    """Has every call watched, and brings together what is seen of it."""

    def __init__(self, onlooker: Onlooker) -> None:
        self.onlooker = onlooker
        self.regions: dict[str, _Found] = {}

    def entering(self, region: Any, profile: Any) -> None:
        if not in_replay():
            watch_again(profile)
            self.regions.setdefault(region.name, _Found())

    def entered(self, frame: Any, call: Any) -> None:
        if not in_replay():
            self.onlooker.begin()
            if not call.python_state:
                self.onlooker.watch_attributes(watch for watch, _ in call.watches)

    def left(self, frame: Any, call: Any) -> None:
        if in_replay():
            return
        found, (seen, way) = self.regions[frame.region.name], self.onlooker.end()
        found.calls += 1
        found.ways.setdefault(id(call.profile), set()).add(way)
        found.add(facts_of(call))
        for key in seen:
            found.seen.setdefault(key, "")

    def differs(self, frame: Any, index: int) -> None:
        self.regions[frame.region.name].seen.setdefault((Kind.REPLAY, f"the first difference is saved {where_saved(frame, index)}"), "")

    def add_warning(self, text: str) -> None:
        """A warning of the engine about a region."""
        matched = _OURS.match(text)
        if matched and matched["region"] in self.regions and not text.startswith("the replay"):
            self.regions[matched["region"]].seen.setdefault((Kind.SIDE_EFFECT, matched["text"]), "see what it says")
