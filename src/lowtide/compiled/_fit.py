"""``fit_compiled``: compile, measure, compile otherwise, until the measured peak of a compiled step is within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from lowtide import _torch_compiler as torch_compiler
from lowtide.compiled._candidates import Candidates
from lowtide.compiled._ladder import Rung, ladder
from lowtide.compiled._options import CompileOptions
from lowtide.compiled._partitioner import Rule
from lowtide.compiled._versions import Site, Versions
from lowtide.errors import InfeasibleBudgetError, InvalidInputError, StepError, VerificationError
from lowtide.measure import free_bytes, live_storages, peak_bytes
from lowtide.trace import TrainingState, device_of, record_step
from lowtide.units import Budget, format_bytes, parse_budget
from lowtide.verify import Reference

Progress = Callable[[str], None]
T = TypeVar("T")

_MOST_TRIES = 12
_MOST_RIVALS = 6
"""Timed against each other."""
_ROUNDING = 1e-2
"""A gradient that is further off, relative to its largest element, is no matter of rounding."""
_ROUNDINGS = 256
"""So many roundings of the largest of all gradients a gradient may be off, however small it is, but no more than a hundredth of it."""


@dataclass(frozen=True)
class CompiledFit:
    """How a compiled model was split, and what was measured.

    Attributes:
        budget_bytes: the peak that was allowed.
        peak_bytes: the measured peak of the step; never above the budget.
        predicted_peak_bytes: by the simulated timelines.
        plain_peak_bytes: measured, of the compiled step without a budget.
        difference: the largest difference between a gradient, buffer or output of this step and of the compiled step without a budget,
            relative to the largest element; 0.0 where they are equal bit for bit.
        tried: predicted and measured peak of everything that was compiled.
        graphs: how many graphs the step has.
    """

    budget_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int
    plain_peak_bytes: int
    difference: float
    tried: tuple[tuple[int, int], ...]
    graphs: int


def fit_compiled(
    model: nn.Module,
    step: Callable[[], object],
    options: CompileOptions,
    budget: str | int | Budget | None = None,
    *,
    progress: Progress | None = None,
) -> CompiledFit:
    """Have the measured peak of a step that calls compiled modules within a budget.

    The step is compiled as PyTorch would split it, and measured. What else its graphs could save is solved for; the ways that are predicted
    to be the fastest within the budget are compiled and measured, and those that PyTorch's own knob would take; what is within is timed
    against each other, and the fastest is left in force. What was compiled before in this process is dropped. Afterwards parameters,
    buffers, gradients, optimizer state and random state are as they were before. Fits with the same options know what the earlier ones have
    measured, and a smaller budget never leads to a larger peak.

    What is alive before the step counts as in ``lowtide.fit``: on the CPU what the step uses of it, for which the step runs once as
    Python; on CUDA all that the process has on the device.

    The shapes of the step are compiled as they are, not as symbols. Others that come later are split by the same number of bytes, and not
    measured.

    Args:
        model: the model that the step trains, compiled as a whole or in parts with ``options``.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.
        options: from ``lowtide.compile_options``.
        budget: instead of that of ``options``.
        progress: told, in a few words, what is being done.

    Returns:
        What was measured.

    Raises:
        BudgetError: the budget cannot be read.
        InvalidInputError: ``options`` are not those of ``lowtide.compile_options``.
        StepError: no graph of the step was compiled with ``options``, by inductor, forward and backward.
        InfeasibleBudgetError: no way was measured within the budget; the error has the smallest peak that was measured.
        VerificationError: gradients differ from those of the compiled step without a budget by more than rounding.
        Exception: whatever the step raises.
    """
    if not isinstance(options, CompileOptions):
        raise InvalidInputError(
            f"options are what lowtide.compile_options returned, as it was passed to torch.compile; found {type(options).__name__}"
        )
    if budget is not None:
        options.budget = parse_budget(budget)
    fitting = _Fitting(model, step, options, progress or (lambda _: None))
    start = fitting.kept_apart(lambda: TrainingState(model, step))
    try:
        with torch_compiler.compiled_always():
            return fitting.run()
    except BaseException:
        options.forget()
        torch._dynamo.reset()
        raise
    finally:
        start.restore()


class _Fitting:
    """One call of ``fit_compiled``."""

    def __init__(self, model: nn.Module, step: Callable[[], object], options: CompileOptions, say: Progress) -> None:
        self._model, self._step, self._options, self._say = model, step, options, say
        self._device = device_of(model)
        self._ours: set[int] = set()

    def kept_apart(self, make: Callable[[], T]) -> T:
        """Make something whose tensors are not the step's, and do not count."""
        before = live_storages(self._model, self._device).keys()
        made = make()
        self._ours |= live_storages(self._model, self._device).keys() - before
        return made

    def run(self) -> CompiledFit:
        self._say("compiling the step without a budget")
        for number, partitioner in enumerate(self._options.all()):
            partitioner.seen.clear()
            partitioner.rule = Rule(tag=number)
        self._versions = Versions(self._step, self._options, (), self._device)
        torch._dynamo.reset()
        self._versions.settle()
        self._versions.sites = sites = self._graphs()
        if not sites:
            raise _nothing_compiled()
        settled = self.kept_apart(lambda: TrainingState(self._model, self._step))
        reference = self.kept_apart(lambda: Reference(self._model, self._step, settled))
        self._resident = self._resident_bytes(settled)
        self._say("measuring the step without a budget")
        plain_peak = self._measured()
        allowed = self._resolve(plain_peak)
        self._say("solving for what to save")
        by_torch = [Rung.of(ways) for ways in zip(*(site.menu.by_torch for site in sites), strict=True)]
        self._found = found = Candidates(ladder([site.menu.ways for site in sites]), by_torch)
        self._versions.plain = plain = found.rungs[found.plain]
        if self._options.measured.get(plain.ways) != plain_peak:  # another step, or its state has grown
            self._options.measured, self._options.taken = {plain.ways: plain_peak}, {}
        found.peaks = {k: self._options.measured[rung.ways] for k, rung in enumerate(found.rungs) if rung.ways in self._options.measured}
        chosen = self._left(self._ranked(allowed), allowed)
        difference = self._verified(reference)
        offset = plain_peak - plain.peak_bytes
        tried = tuple((found.rungs[k].peak_bytes + offset, peak) for k, peak in found.peaks.items())
        return CompiledFit(allowed, found.peaks[chosen], found.rungs[chosen].peak_bytes + offset, plain_peak, difference, tried, len(sites))

    def _graphs(self) -> list[Site]:
        found = [Site(seen.order, p, signature, seen.menu) for p in self._options.in_use() for signature, seen in p.seen.items()]
        return sorted(found, key=lambda site: site.order)

    def _ranked(self, allowed: int) -> list[int]:
        """Rungs whose measured peak is within the budget, from the fastest on.

        A fit for a larger budget looked at more: what it took is taken here as well where it is within. What a fit for a smaller one took
        is a choice here, but nothing of less peak. So peaks never rise as the budget falls.
        """
        found, taken = self._found, [(size, self._found.number(ways)) for size, ways in sorted(self._options.taken.items())]
        again = next((k for size, k in taken if size >= allowed and k is not None and found.peaks[k] <= allowed), None)
        if again is not None:
            return [again]
        self._search(allowed)
        least = max((found.peaks[k] for size, k in taken if size <= allowed and k is not None), default=0)
        rivals = [k for k in found.within(allowed) if found.peaks[k] >= least][:_MOST_RIVALS]
        if len(rivals) < 2 or self._keeps_pools():
            return rivals
        self._say(f"timing {len(rivals)} ways within the budget against each other")
        times = self._versions.times([found.rungs[k] for k in rivals])
        return sorted(rivals, key=lambda k: times.get(rivals.index(k), float("inf")))

    def _search(self, allowed: int) -> None:
        """Compile and measure what may be the fastest within a budget."""
        found = self._found
        for tries in range(_MOST_TRIES):
            following = found.next(allowed, tries)
            if following is None:
                break
            self._try(following)
        if not found.within(allowed):
            raise _infeasible(allowed, min(found.peaks.values()))
        rivals: list[int] = []
        while not self._keeps_pools() and (rival := found.next_rival(allowed, rivals)) is not None:
            rivals.append(rival)
            self._try(rival)

    def _try(self, k: int) -> None:
        rung = self._found.rungs[k]
        self._say(f"compiling for {format_bytes(self._found.predicted(k))}")
        if self._keeps_pools():
            torch._dynamo.reset()
        with self._versions.using(rung):
            self._found.peaks[k] = self._options.measured[rung.ways] = self._measured()
        self._say(f"measured {format_bytes(self._found.peaks[k])}")

    def _left(self, ranked: Iterable[int], allowed: int) -> int:
        """The first of some rungs that is measured within the budget once nothing else is compiled; it is in force."""
        for k in ranked:
            rung = self._found.rungs[k]
            self._say(f"leaving {format_bytes(self._found.peaks[k])} in force")
            self._versions.leave(rung)
            self._found.peaks[k] = self._options.measured[rung.ways] = self._measured()
            if self._found.peaks[k] <= allowed:
                self._options.taken[allowed] = rung.ways
                return k
        raise _infeasible(allowed, min(self._found.peaks.values()))

    def _keeps_pools(self) -> bool:
        """CUDA graphs keep their memory as long as they are there: only one way is compiled at a time."""
        return bool(self._options.get("triton.cudagraphs"))

    def _measured(self) -> int:
        return peak_bytes(self._step, self._device, self._resident)

    def _resident_bytes(self, settled: TrainingState) -> int:
        """What is there before the step: on CUDA whatever the allocator counts, on the CPU what belongs to the step, as in its trace."""
        if self._device.type == "cuda":
            return sum(size for key, size in live_storages(self._model, self._device).items() if key not in self._ours)
        try:
            return record_step(self._model, self._step).resident_bytes
        finally:
            settled.restore()

    def _resolve(self, plain_peak: int) -> int:
        budget = self._options.budget
        if budget.bytes is not None:
            return budget.bytes
        if budget.share is not None:
            return int(plain_peak * budget.share)
        if budget.activation_share is not None:
            return self._resident + int((plain_peak - self._resident) * budget.activation_share)
        return self._resident + free_bytes(self._device)

    def _verified(self, reference: Reference) -> float:
        self._say("comparing gradients")
        found = reference.distances(nullcontext)
        noise = _noise(reference.first)
        (_, worst), difference = max(((key, 0.0 if far <= noise.get(key[1], 0.0) else far) for key, far in found.items()), key=_distance)
        spread = max((d.distance for d in reference.unsteady), default=0.0)
        if difference > max(_ROUNDING, 10 * spread):
            raise VerificationError(
                f"compiled within the budget, {worst} differs by {difference:.2g} relative to its largest element from the compiled step "
                "without one, which is more than rounding: please report it"
            )
        return difference


def _distance(found: tuple[object, float]) -> float:
    return found[1]


def _noise(seen: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far apart two roundings of one gradient may be, relative to its largest element.

    A gradient that is zero but for rounding, as of a bias before batch norm, is another one each time it is rounded otherwise: what it is
    made of is as large as other gradients.
    """
    gradients = {name: t for name, t in seen.items() if "gradient of " in name and t.is_floating_point() and t.numel()}
    largest = {name: float(tensor.abs().max()) for name, tensor in gradients.items()}
    top = max(largest.values(), default=0.0)
    return {name: min(_ROUNDINGS * torch.finfo(t.dtype).eps, _ROUNDING) * top / (largest[name] or 1e-300) for name, t in gradients.items()}


def _nothing_compiled() -> StepError:
    return StepError(
        "no graph of the step was compiled with these options: pass them to torch.compile(…, options=options) or "
        "module.compile(options=options), with the inductor backend (others have no place for a partitioner), and let the step call "
        "backward"
    )


def _infeasible(budget_bytes: int, smallest_bytes: int) -> InfeasibleBudgetError:
    message = (
        f"no way to split the compiled graphs fits a peak of {format_bytes(budget_bytes)} ({budget_bytes} bytes): the smallest that was "
        f"measured is {format_bytes(smallest_bytes)} ({smallest_bytes} bytes)"
    )
    return InfeasibleBudgetError(message, budget_bytes=budget_bytes, smallest_bytes=smallest_bytes)
