"""``verify``: a step plain and checkpointed, from the same state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace

import torch
from torch import nn

from lowtide import _torch_compiler as torch_compiler
from lowtide.engine import regions_in_graphs, replay_seconds
from lowtide.errors import AlreadyAppliedError, InvalidInputError, StepError
from lowtide.plan import Plan
from lowtide.policy import Policy
from lowtide.records import Decision
from lowtide.torch_compat._torch_regions import without_checkpointing
from lowtide.trace import TrainingState, device_of
from lowtide.verify._difference import region_of
from lowtide.verify._first_op import FirstOps, left_to_the_report
from lowtide.verify._precision import Autocast, precision_of
from lowtide.verify._ranks import Ranks
from lowtide.verify._reference import Reference
from lowtide.verify._regions import chosen, names_for, regions_noted
from lowtide.verify._result import ReplayDifference, Verification
from lowtide.verify._runs import Context, Observed, Runs, snapshot


def verify(
    model: nn.Module,
    step: Callable[[], object],
    *,
    plan: Plan | None = None,
    policy: Policy | str | Callable[..., Decision] | None = None,
    steps: int = 3,
    three_way: bool = False,
    autocast_dtype: torch.dtype = torch.bfloat16,
    timeout_s: float = 300.0,
) -> Verification:
    """Compare a checkpointed step with the plain one: loss, outputs, gradients, parameters, buffers, optimizer and random state.

    Both start from the same state and run ``steps`` training steps, the plain one twice: where it is the same bit for bit both times, so
    has the checkpointed one to be; where it differs from itself, the checkpointed one may differ as much. Parameters, buffers,
    gradients, optimizer state and random state are put back afterwards, and so is what else the step can reach.

    What is checkpointed is the plan or policy; without one what the step checkpoints itself, by regions that are installed or by calls of
    ``lowtide.checkpoint`` and ``torch.utils.checkpoint``; in a step that does not, every block of the model. Plain is the same step with
    all of that switched off.

    Under ``torch.distributed`` every process calls this with its share of the step. All get the same verdict.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.
        plan, policy: what to replay; one of them, as for ``lowtide.apply``.
        steps: how many training steps to compare.
        three_way: run the step in FP32, under autocast, and under autocast with checkpointing. What differs between the first two is the
            precision's doing; the verdict is about the last two.
        autocast_dtype: of the autocast that is put around a step that has none of its own.
        timeout_s: with several processes, how long a collective of the step may wait for the others.

    Returns:
        The verdict, with the worst tensor, its region, and the first op whose replay differs. That the checkpointed step raises where the
        plain one does not is a verdict as well.

    Raises:
        InvalidInputError: ``steps`` is not above zero; both a plan and a policy; no such policy; a parameter without values yet.
        StepError: no region ran, or none of a plan or policy was replayed, so that there was nothing to compare; the step ran out of data.
        PlanError, PolicyError: the plan or policy does not suit the model.
        AlreadyAppliedError: a plan or policy was given, and one of the model's modules has a region already.
        Exception: whatever the plain step raises.
    """
    if steps < 1:
        raise InvalidInputError(f"steps is a number above zero; found {steps}")
    if plan is not None and policy is not None:
        raise InvalidInputError("both a plan and a policy were given: pass one of them")
    ranks = Ranks(timeout_s)
    start = snapshot(model, step)
    try:
        with ranks.bounded(), left_to_the_report(), torch_compiler.compiled_often():
            before = replay_seconds(), regions_in_graphs()
            asked = policy if plan is None else plan
            way = None if asked is None else chosen(model, step, start, asked)
            autocast = Autocast(device_of(model), autocast_dtype) if three_way else None
            found = _Verifying(model, step, start, ranks, autocast).run(way, steps)
            if found.equal and asked is not None and (replay_seconds(), regions_in_graphs()) == before:
                raise StepError(
                    "nothing was verified, for no region was replayed: "
                    "a step runs forward and backward, such as loss_fn(model(x), y).backward()"
                )
            return found
    finally:
        start.restore()


class _Verifying:
    """One call of ``verify``."""

    def __init__(self, model: nn.Module, step: Callable[[], object], start: TrainingState, ranks: Ranks, autocast: Autocast | None) -> None:
        self._model, self._step, self._start, self._ranks, self._autocast = model, step, start, ranks, autocast
        self._failed_at_s = float("inf")

    def run(self, checkpointed: Context | None, steps: int) -> Verification:
        single = None if self._autocast is None else self._in_single_precision(self._autocast)
        around = nullcontext if self._autocast is None else self._autocast.on
        plain = _both(around, without_checkpointing)
        reference = Reference(self._model, self._step, self._start, steps=steps, plain=plain, agree=self._ranks.any)
        found, way = self._compared(reference, around, checkpointed)
        found = replace(found, unsteady=next(iter(reference.unsteady), None))
        every = self._ranks.gather(found)
        if not any(here.error for here in every):
            _refuse_nothing(every)
            if not all(here.equal and here.repeatable for here in every):
                found = replace(found, replays=self._first_ops(reference.runs, way))
            if single is not None and self._autocast is not None:
                found = replace(found, precision=precision_of(single, reference.first, reference.runs.once(way), self._autocast.dtype))
            every = self._ranks.gather(found)
        return _agreed(found, every, self._ranks.gather(self._failed_at_s))

    def _in_single_precision(self, autocast: Autocast) -> Observed:
        return Runs(self._model, self._step, self._start).once(_both(autocast.off, without_checkpointing))

    def _compared(self, reference: Reference, around: Context, checkpointed: Context | None) -> tuple[Verification, Context]:
        """The comparison, and the way it was made. An error of the checkpointed step is a difference too: the plain one raised none."""
        ran: list[str] = []
        way = around
        try:
            way = _both(around, checkpointed or chosen(self._model, self._step, self._start, None))
            found = reference.compare(_both(way, lambda: _noted(self._model, ran)))
        except (InvalidInputError, AlreadyAppliedError):
            raise  # what was asked for cannot be had
        except Exception as error:
            self._failed_at_s = time.time()
            return _raised(error, reference.repeatable), way
        regions = tuple(dict.fromkeys(ran))
        worst = found.worst and replace(found.worst, region=region_of(found.worst.name, regions))
        return replace(found, regions=regions, worst=worst), way

    def _first_ops(self, runs: Runs, way: Context) -> tuple[ReplayDifference, ...]:
        looking = FirstOps(names_for(self._model))
        with suppress(Exception):  # what was found so far is worth more than why the search ended
            runs.once(_both(way, looking.looking))
        return looking.found


def _refuse_nothing(every: list[Verification]) -> None:
    if not any(found.regions for found in every):
        raise StepError(
            "nothing was verified, for no region ran: a region runs when its module or function is called while gradients are recorded"
        )


def _agreed(found: Verification, every: list[Verification], failed_at_s: list[float]) -> Verification:
    """One verdict of all processes, with what each found: first that of the process that failed first, or whose replay differs."""
    if len(every) == 1:
        return found
    bad = [rank for rank, here in enumerate(every) if not here.equal]
    cause = min(bad, key=lambda rank: (failed_at_s[rank], not every[rank].replays), default=None)
    summaries = tuple(here.summary for here in every)
    if cause is None:
        return replace(found, summary=f"on {len(every)} ranks: {found.summary}", ranks=summaries)
    return replace(every[cause], equal=False, summary=f"rank {cause}: {every[cause].summary}", ranks=summaries)


def _both(outer: Context, inner: Context) -> Context:
    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(outer())
            stack.enter_context(inner())
            yield

    return context


@contextmanager
def _noted(model: nn.Module, ran: list[str]) -> Iterator[None]:
    with regions_noted(model) as found:
        yield
    ran += found


def _raised(error: Exception, repeatable: bool) -> Verification:
    text = f"{type(error).__name__}: {error}"
    region, op, source = (str(getattr(error, name, "")) for name in ("region", "op", "source"))
    replays = (ReplayDifference(region, op, source),) if region else ()
    summary = f"the checkpointed step raises where the plain one does not: {text}"
    return Verification(False, repeatable, 0, 0, (), summary, replays=replays, error=text)
