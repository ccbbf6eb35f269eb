"""``doctor``: examine a step, and ask every family of symptoms."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.errors import InvalidInputError
from lowtide.plan import Plan
from lowtide.policy import Policy
from lowtide.records import Decision
from lowtide.torch_compat._torch_regions import without_checkpointing
from lowtide.trace import TrainingState, trace
from lowtide.verify._first_op import FirstOps, left_to_the_report
from lowtide.verify._ranks import Ranks
from lowtide.verify._regions import applied, names_for
from lowtide.verify._result import ReplayDifference
from lowtide.verify._runs import Context, snapshot
from lowtide.verify._verify import verify
from lowtide.verify.audit import audit
from lowtide.verify.doctor import _gradients, _idle, _memory, _mismatch, _out_of_memory, _reentrant, _slow
from lowtide.verify.doctor._examination import Examination
from lowtide.verify.doctor._finding import Diagnosis, Finding, Severity
from lowtide.verify.doctor._look import look

_FAMILIES = (_gradients, _mismatch, _reentrant, _out_of_memory, _idle, _slow, _memory)


def doctor(
    model: nn.Module,
    step: Callable[[], object],
    *,
    plan: Plan | None = None,
    policy: Policy | str | Callable[..., Decision] | None = None,
    limit_bytes: int | None = None,
    timeout_s: float = 300.0,
) -> Diagnosis:
    """Look for the symptoms that people have with activation checkpointing, whoever does it in this step.

    The step runs as it is and with all checkpointing switched off; both are traced and compared, and regions are audited. Findings name
    what was seen in this model, and the command or line that mends it.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.
        plan, policy: what is put in force for the examination; without, the step is examined as it is.
        limit_bytes: what the device has; to be told what is in the way where the step needs more.
        timeout_s: with several processes, how long a collective of the step may wait for the others.

    Returns:
        The findings; none where nothing is wrong. Model, optimizer and random state are as they were.

    Raises:
        InvalidInputError: both a plan and a policy; a parameter without values yet.
        Exception: what the step raises without checkpointing as well.
    """
    if plan is not None and policy is not None:
        raise InvalidInputError("both a plan and a policy were given: pass one of them")
    asked = policy if plan is None else plan
    ranks, state = Ranks(timeout_s), snapshot(model, step)
    try:
        with ranks.bounded():
            way = nullcontext if asked is None else applied(model, step, asked)
            exam = _examined(model, step, way, ranks, state, limit_bytes)
            found = [finding for family in _FAMILIES for finding in family.find(exam)]
            return _agreed(found, ranks, exam)
    finally:
        state.restore()


def _examined(
    model: nn.Module, step: Callable[[], object], way: Context, ranks: Ranks, state: TrainingState, limit_bytes: int | None
) -> Examination:
    """The same runs in every process: what one of them would skip, the others would wait for."""
    with way():
        seen = look(model, step)
        state.restore()
        failed = ranks.any(seen.error is not None)
        if seen.error is not None and ranks.count == 1 and not _is_distributed(model):
            _raise_if_plain_fails(step, seen.error, state)
        if seen.error is not None and ranks.count == 1 and not _is_distributed(model):
            return Examination(model, step, seen, limit_bytes, replays=_first_ops(model, step, state))
        if failed or not (ranks.any(seen.checkpoints) or limit_bytes is not None):
            return Examination(model, step, seen, limit_bytes)
        with without_checkpointing():
            plain = trace(model, step)
        state.restore()
        if not ranks.any(seen.checkpoints):
            return Examination(model, step, seen, limit_bytes, plain)
        as_it_is = trace(model, step)
        state.restore()
        verification, audited = verify(model, step, steps=2), audit(model, step)
        return Examination(model, step, seen, limit_bytes, plain, as_it_is, verification, audited)


def _first_ops(model: nn.Module, step: Callable[[], object], state: TrainingState) -> tuple[ReplayDifference, ...]:
    """The step that failed once more, with its ops compared."""
    looking = FirstOps(names_for(model))
    try:
        with suppress(Exception), left_to_the_report(), looking.looking():
            step()
    finally:
        state.restore()
    return looking.found


def _is_distributed(model: nn.Module) -> bool:
    """A step that failed leaves its mark in what counts gradients: the next one fails as well, checkpointed or not."""
    return any(isinstance(module, DistributedDataParallel) for module in model.modules())


def _raise_if_plain_fails(step: Callable[[], object], error: Exception, state: TrainingState) -> None:
    """An error of the step's own is no symptom."""
    try:
        with without_checkpointing():
            step()
    except Exception:
        raise error from None
    finally:
        state.restore()


def _agreed(found: list[Finding], ranks: Ranks, exam: Examination) -> Diagnosis:
    if exam.look.error is not None and not found:
        text = " ".join(f"{type(exam.look.error).__name__}: {exam.look.error}".split())[:400]
        mend = "lowtide verify TARGET"
        found = [Finding("fails with checkpointing", Severity.ERROR, "the step raises with checkpointing, and not without", text, mend)]
    every = ranks.gather(found)
    once = sorted(dict.fromkeys(finding for findings in every for finding in findings), key=lambda f: f.severity is not Severity.ERROR)
    return Diagnosis(tuple(once), tuple(map(len, every)) if len(every) > 1 else ())
