"""Backward is slower than it needs to be."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from itertools import chain, islice

from lowtide import _torch_private as private
from lowtide.records import Op, StepTrace
from lowtide.units import format_seconds
from lowtide.verify._regions import module_behind, names_for
from lowtide.verify.audit import Kind
from lowtide.verify.doctor._examination import Examination
from lowtide.verify.doctor._finding import Finding, Severity
from lowtide.verify.doctor._look import TORCH

_TOO_LONG = 0.6
"""A region that is more than this share of the forward, with others beside it."""
_MOST_OF_REPLAY = 0.5
_OF_FORWARD = 0.2
_SMALL_RESULT = 0.1
_MOSTLY = 0.9


def find(exam: Examination) -> Iterator[Finding]:
    """Each reason that was seen."""
    yield from _debug(exam)
    yield from _again(exam)
    yield from _double(exam)
    yield from _by_time(exam)
    yield from _collectives(exam)


def _by_time(exam: Examination) -> Iterator[Finding]:
    """The first of them: a region that is too long for one op in it is told by that op."""
    if exam.plain is not None and exam.as_it_is is not None:
        steady = _undisturbed(exam.plain, exam.as_it_is)
        yield from islice(chain(_expensive(exam, steady), _too_long(exam, steady)), 1)


def _undisturbed(trace: StepTrace, again: StepTrace) -> StepTrace:
    """With the least time that each op took in either: where other programs want the cores too, one run says little."""
    least: dict[Hashable, float] = {}
    for op in chain(trace.ops, again.ops):
        least[_kind(op)] = min(op.seconds, least.get(_kind(op), op.seconds))
    return replace(trace, ops=tuple(replace(op, seconds=least[_kind(op)]) for op in trace.ops))


def _kind(op: Op) -> Hashable:
    return op.name, op.source, op.born_bytes


def _debug(exam: Examination) -> Iterator[Finding]:
    logged = [region for region in exam.look.torch_calls if region.debug]
    if logged:
        everywhere = private.checkpoint_debug_forced()
        where = "by set_checkpoint_debug_enabled" if everywhere else "in the call or its wrapper (debug=True)"
        name = names_for(exam.model)(logged[0].function)
        evidence = f"{len(logged)} of {len(exam.look.torch_calls)} calls of torch.utils.checkpoint log every op, {name} for one"
        mend = "set_checkpoint_debug_enabled(None)" if everywhere else "debug=False; lowtide's errors name op and line without it"
        yield _finding("debug is on", f"torch's checkpoint is in debug mode, {where}", evidence, mend)


def _again(exam: Examination) -> Iterator[Finding]:
    for run in exam.look.regions.values():
        if run.replays > run.calls:
            evidence = f"{run.calls} calls, {run.replays} replays, {format_seconds(run.replay_s)}"
            mend = "sum the losses and go backward once"
            yield _finding("replayed more than once", f"region {run.name!r} is replayed by each of several backward passes", evidence, mend)
            return


def _double(exam: Examination) -> Iterator[Finding]:
    for (outer, inner), (one, other) in exam.look.around.items():
        if one != other or (one == TORCH and _covers(exam, outer, inner)):
            what = f"{inner!r} is a region of {other} inside {outer!r}, a region of {one}: its forward runs three times"
            yield _finding("double wrapping", what, f"{len(exam.look.around)} regions run inside others", "switch one of the two off")
            return


def _covers(exam: Examination, outer: str, inner: str) -> bool:
    """Whether two functions run about the same module: what is inside has nearly all parameters of what is around it."""
    sizes: dict[str, int] = {}
    for region in exam.look.torch_calls:
        module = module_behind(region.function)
        sizes[names_for(exam.model)(region.function)] = 0 if module is None else sum(p.numel() for p in module.parameters())
    return outer == inner or sizes.get(inner, 0) >= _MOSTLY * max(sizes.get(outer, 0), 1)


def _too_long(exam: Examination, plain: StepTrace) -> Iterator[Finding]:
    forward = exam.forward_of(plain)
    seconds = {region: _seconds(ops) for region, ops in forward.items() if region is not None}
    longest = max(seconds, key=lambda region: seconds[region], default=None)
    if longest is not None and len(seconds) > 1:
        total = sum(map(_seconds, forward.values()))
        evidence = f"{format_seconds(seconds[longest])} of {format_seconds(total)} of forward, beside {len(seconds) - 1} others"
        what = f"region {longest!r} is most of the forward: backward waits for all of it to be replayed"
        if seconds[longest] > _TOO_LONG * total:
            yield _finding("regions too long", what, evidence, 'instead a region for each block: lowtide.apply(model, "full")')


def _expensive(exam: Examination, plain: StepTrace) -> Iterator[Finding]:
    """One op that is most of a region's replay and whose result is small."""
    forward = exam.forward_of(plain)
    forward_s = sum(map(_seconds, forward.values()))
    for region, ops in forward.items():
        ops = [op for op in ops if not op.collective] or ops
        worst, total = max(ops, key=lambda op: op.seconds), _seconds(ops)
        made = sum(op.born_bytes for op in ops)
        is_large = worst.seconds > _MOST_OF_REPLAY * total and worst.seconds > _OF_FORWARD * forward_s
        if region is not None and is_large and worst.born_bytes <= _SMALL_RESULT * made:
            what = f"{worst.name} at {worst.source or 'an unknown line'} is most of what the replay of {region!r} costs"
            evidence = (
                f"{format_seconds(worst.seconds)} of {format_seconds(total)}; its result is {worst.born_bytes / made:.0%} of the bytes"
            )
            name = worst.name.rpartition(".")[0]
            mend = f'keep its result: lowtide.apply(model, lowtide.policy.keep(lowtide.policy.op("{name}")))'
            yield _finding("an expensive op is replayed", what, evidence, mend)
            return


def _seconds(ops: list[Op]) -> float:
    return sum(op.seconds for op in ops)


def _collectives(exam: Examination) -> Iterator[Finding]:
    seen = [(region.region, o) for region in (exam.audit.regions if exam.audit else ()) for o in region.observations]
    sent = [(region, o) for region, o in seen if o.kind is Kind.COLLECTIVE]
    if sent:
        what = f"region {sent[0][0]!r} communicates ({sent[0][1].what}), and so does each of its replays"
        yield _finding("a collective is replayed", what, f"{len(sent)} collectives in regions", sent[0][1].how)


def _finding(symptom: str, what: str, evidence: str, mend: str) -> Finding:
    return Finding(symptom, Severity.WARNING, what, evidence, mend)
