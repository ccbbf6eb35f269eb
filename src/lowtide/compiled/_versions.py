"""Several ways to compile one step side by side in one process, so that they can be measured and timed against each other.

The compiler keeps what it has made by the backend that made it. Each way of a step is given backends of its own: copies of
those that ``torch.compile`` was called with, whose partitioners follow other rules. Equal rules are equal backends: modules
that are alike and treated alike are compiled once, within a way and across ways.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide import _torch_compiler as torch_compiler
from lowtide.compiled._ladder import Rung
from lowtide.compiled._options import KEY, CompileOptions
from lowtide.compiled._partitioner import Menu, Partitioner, Rule
from lowtide.measure import ratio, time_in_turns

_FIRST_ROUNDS = 3
_ROUNDS = 9
_TIMING_S = 30.0
"""What the last rounds may take, as long as they are no fewer than the first."""
_CLOSE = 1.04
"""What takes longer than the fastest by more than this in the first rounds is out."""


@dataclass(frozen=True)
class Site:
    """A graph, and who splits it."""

    order: int
    partitioner: Partitioner
    signature: str
    menu: Menu


@dataclass
class Versions:
    """The ways of one step.

    Attributes:
        step: what is compiled, whichever way.
        options: that it is compiled with.
        sites: its graphs in the order in which they run forward.
        device: that it runs on.
        plain: what it was compiled to by the backends themselves.
    """

    step: Callable[[], object]
    options: CompileOptions
    sites: Sequence[Site]
    device: torch.device
    plain: Rung | None = None
    _backends: list[tuple[Any, Rule, Any]] = field(default_factory=list)
    _compiled: set[int] = field(default_factory=set)

    @contextmanager
    def using(self, rung: Rung) -> Iterator[None]:
        """In here the step is compiled one way; what it was compiled to before is used again."""
        if rung is self.plain:
            yield
            return
        rules = {id(partitioner): Rule(ways) for partitioner, ways in self._ways(rung)}

        def backend_of(found: Any) -> Any:
            config = getattr(found, "config", None)
            rule = rules.get(id(config.get(KEY))) if isinstance(config, dict) else None
            return found if rule is None else self._backend(found, rule)

        with torch_compiler.compiled_by(backend_of):
            if id(rung) not in self._compiled:
                self._compiled.add(id(rung))
                self.settle()
            yield

    def leave(self, rung: Rung) -> None:
        """Compile the step one way that stays in force, and drop all others."""
        for partitioner, ways in self._ways(rung):
            most = [way.peak_bytes for site, way in zip(self.sites, rung.ways, strict=True) if site.partitioner is partitioner]
            partitioner.rule = Rule(ways, allowed_bytes=max(most, default=None))
        self._backends.clear()
        self._compiled.clear()
        torch._dynamo.reset()
        self.settle()

    def settle(self) -> None:
        """What is allocated once is there, and what the first step leaves to the collector is gone."""
        self.step()
        self.step()
        gc.collect()

    def times(self, rungs: Sequence[Rung]) -> dict[int, float]:
        """How long the step takes, over what it takes without a budget: of the rungs that may be the fastest, by number.

        All take turns, for machines are shared and drift; each is compared with the plain one in its own round.
        """
        rough, round_s = self._ratios(rungs, _FIRST_ROUNDS)
        left = [k for k, found in enumerate(rough) if found <= _CLOSE * min(rough)]
        if len(left) == 1:
            return {left[0]: rough[left[0]]}
        rounds = min(max(int(_TIMING_S / round_s), _FIRST_ROUNDS), _ROUNDS)
        return dict(zip(left, self._ratios([rungs[k] for k in left], rounds)[0], strict=True))

    def _ratios(self, rungs: Sequence[Rung], rounds: int) -> tuple[list[float], float]:
        """Each over the plain one, and the seconds that a round takes."""

        def run(rung: Rung) -> Callable[[], None]:
            def once() -> None:
                with self.using(rung):
                    self.step()

            return once

        on_one_core = self.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if on_one_core else time.perf_counter
        assert self.plain is not None
        plain, *times = time_in_turns([run(rung) for rung in (self.plain, *rungs)], rounds, self.device, clock=clock)
        return [ratio(each, plain) for each in times], sum(each.median_s for each in (plain, *times))

    def _ways(self, rung: Rung) -> list[tuple[Partitioner, tuple[tuple[str, tuple[str, ...]], ...]]]:
        """What each partitioner is to do."""
        told = list(zip(self.sites, rung.ways, strict=True))
        return [(p, tuple((s.signature, way.saved) for s, way in told if s.partitioner is p)) for p in self.options.all()]

    def _backend(self, original: Any, rule: Rule) -> Any:
        for of, by, backend in self._backends:
            if of is original and by == rule:
                return backend
        backend = copy.copy(original)
        backend.config = {**original.config, KEY: Partitioner(lambda: rule)}
        self._backends.append((original, rule, backend))
        return backend
