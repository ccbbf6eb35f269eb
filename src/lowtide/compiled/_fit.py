"""``fit_compiled``: compile, measure, compile otherwise, until the measured peak of a compiled step is within a budget."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from lowtide import _torch_compiler as torch_compiler
from lowtide.compiled._ladder import Rung, ladder
from lowtide.compiled._options import CompileOptions
from lowtide.compiled._partitioner import Menu, Partitioner, Rule
from lowtide.errors import InfeasibleBudgetError, InvalidInputError, StepError, VerificationError
from lowtide.measure import free_bytes, live_storages, peak_bytes
from lowtide.trace import TrainingState, device_of
from lowtide.units import Budget, format_bytes, parse_budget
from lowtide.verify import Reference

Progress = Callable[[str], None]
T = TypeVar("T")

_MOST_TRIES = 12
_ENOUGH_TRIES = 3
"""Once something within the budget is found, faster ways are looked for until so many were compiled."""
_CLOSE = 0.02
"""Of the budget: a faster way that is predicted to be over it by no more is tried as well."""
_FAR = 0.1
"""Of the budget: what is predicted to be over it by more is not tried, but for the leanest way."""
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

    The step is compiled as PyTorch would split it, and measured; what else its graphs could save is solved for; and the fastest way whose
    measured peak is within the budget is left in force. Each way that is tried is compiled anew, and all that was compiled before in this
    process is dropped. Afterwards parameters, buffers, gradients, optimizer state and random state are as they were before.

    Shapes that were not part of the step are split by the same number of bytes, and not measured.

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


@dataclass(frozen=True)
class _Site:
    """A graph, and who splits it."""

    order: int
    partitioner: Partitioner
    signature: str
    menu: Menu


class _Fitting:
    """One call of ``fit_compiled``."""

    def __init__(self, model: nn.Module, step: Callable[[], object], options: CompileOptions, say: Progress) -> None:
        self._model, self._step, self._options, self._say = model, step, options, say
        self._device = device_of(model)
        self._tried: dict[int, int] = {}
        self._ours: set[int] = set()
        self._misses = 0

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
        self._compile()
        self._sites = self._graphs()
        if not self._sites:
            raise _nothing_compiled()
        gc.collect()
        settled = self.kept_apart(lambda: TrainingState(self._model, self._step))
        reference = self.kept_apart(lambda: Reference(self._model, self._step, settled))
        self._say("measuring the step without a budget")
        plain = Rung.of([site.menu.plain for site in self._sites])
        plain_peak = self._measured()
        allowed = self._resolve(plain_peak)
        self._offset = plain_peak - plain.peak_bytes
        rungs = self._rungs(plain)
        if self._options.measured.get(plain.ways) != plain_peak:  # another step, or its state has grown
            self._options.measured = {plain.ways: plain_peak}
        self._tried = {k: self._options.measured[rung.ways] for k, rung in enumerate(rungs) if rung.ways in self._options.measured}
        chosen = self._search(rungs, rungs.index(plain), allowed)
        difference = self._verified(reference)
        tried = tuple((rungs[k].peak_bytes + self._offset, peak) for k, peak in self._tried.items())
        return CompiledFit(
            allowed, self._tried[chosen], rungs[chosen].peak_bytes + self._offset, plain_peak, difference, tried, len(self._sites)
        )

    def _graphs(self) -> list[_Site]:
        found = [_Site(seen.order, p, signature, seen.menu) for p in self._options.in_use() for signature, seen in p.seen.items()]
        return sorted(found, key=lambda site: site.order)

    def _rungs(self, plain: Rung) -> list[Rung]:
        self._say("solving for what to save")
        rungs = [
            r for r in ladder([site.menu.ways for site in self._sites]) if r.seconds < plain.seconds or r.peak_bytes < plain.peak_bytes
        ]
        return sorted([*rungs, plain], key=lambda rung: (rung.seconds, rung.peak_bytes))

    def _search(self, rungs: list[Rung], current: int, allowed: int) -> int:
        """The number of the fastest rung whose measured peak is within a budget; it is in force."""
        for _ in range(_MOST_TRIES):
            following = self._next(rungs, allowed)
            if following is None:
                break
            current = following
            self._try(rungs, current)
        within = [k for k, peak in self._tried.items() if peak <= allowed]
        if within and min(within) != current:
            current = min(within)
            self._try(rungs, current)
        if self._tried[current] > allowed:
            raise _infeasible(allowed, min(self._tried.values()))
        return current

    def _next(self, rungs: list[Rung], allowed: int) -> int | None:
        """The rung to try next, if any: the fastest that may be within the budget and is faster than all that are."""
        within = [k for k, peak in self._tried.items() if peak <= allowed]
        left = [k for k in range(min(within, default=len(rungs))) if k not in self._tried]
        # Peaks come in steps: what several predictions in a row have missed is further away than they say.
        most = allowed * (1 + _CLOSE) if within else allowed * (1 - _CLOSE * self._misses)
        likely = [k for k in left if self._predicted(rungs, k) <= most]
        if within and self._misses > _ENOUGH_TRIES:
            return None
        if likely or within:
            return next(iter(likely), None)
        resorts = [k for k in left if k == len(rungs) - 1 or self._predicted(rungs, k) <= allowed * (1 + _FAR)]
        return min(resorts, key=lambda k: self._predicted(rungs, k), default=None)

    def _predicted(self, rungs: list[Rung], k: int) -> int:
        nearest = min(self._tried, key=lambda j: abs(rungs[j].peak_bytes - rungs[k].peak_bytes))
        return rungs[k].peak_bytes + self._tried[nearest] - rungs[nearest].peak_bytes

    def _try(self, rungs: list[Rung], k: int) -> None:
        self._say(f"compiling for {format_bytes(self._predicted(rungs, k))}")
        self._install(rungs[k])
        self._tried[k] = self._options.measured[rungs[k].ways] = self._measured()
        self._misses += 1
        self._say(f"measured {format_bytes(self._tried[k])}")

    def _install(self, rung: Rung) -> None:
        by_partitioner: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
        most: dict[int, int] = {}
        for site, way in zip(self._sites, rung.ways, strict=True):
            by_partitioner.setdefault(id(site.partitioner), []).append((site.signature, way.saved))
            most[id(site.partitioner)] = max(most.get(id(site.partitioner), 0), way.peak_bytes)
        for partitioner in self._options.all():
            ways = by_partitioner.get(id(partitioner), [])
            partitioner.rule = Rule(tuple(ways), allowed_bytes=most.get(id(partitioner)))
        self._compile()

    def _compile(self) -> None:
        torch._dynamo.reset()
        self._step()
        self._step()  # what is allocated once is there, and what the first step leaves to the collector is gone
        gc.collect()

    def _measured(self) -> int:
        self._resident = self._alive()
        return peak_bytes(self._step, self._device, self._resident)

    def _alive(self) -> int:
        return sum(size for key, size in live_storages(self._model, self._device).items() if key not in self._ours)

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
