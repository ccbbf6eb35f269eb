"""Options for ``torch.compile`` that put a byte budget into its partitioner."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch

from lowtide.compiled._menu import Way
from lowtide.compiled._partitioner import Partitioner, Rule
from lowtide.errors import InvalidInputError
from lowtide.measure import free_bytes, live_storages
from lowtide.units import Budget, parse_budget

KEY = "custom_partitioner_fn"


class CompileOptions(dict[str, Any]):
    """What ``torch.compile`` takes as ``options``. Whatever is compiled with them has a partitioner of its own.

    Attributes:
        budget: the peak that is allowed.
        partitioners: in the order in which ``torch.compile`` was called.
        measured: peaks of the ways that were tried.
        taken: by the bytes of the budget, the ways that were left in force.
    """

    def __init__(self, budget: Budget, others: dict[str, Any]) -> None:
        """Nothing has been compiled yet."""
        self.budget = budget
        self.partitioners: list[Partitioner] = []
        self.measured: dict[tuple[Way, ...], int] = {}
        self.taken: dict[int, tuple[Way, ...]] = {}
        self._spare = Partitioner(self._unfitted)
        super().__init__({**others, KEY: self._spare})

    def items(self) -> Any:
        """Read by ``torch.compile`` once in each call: there each is given its own partitioner."""
        self.partitioners.append(Partitioner(self._unfitted))
        return {**self, KEY: self.partitioners[-1]}.items()

    def in_use(self) -> list[Partitioner]:
        """The partitioners that were given a graph."""
        return [each for each in (self._spare, *self.partitioners) if each.seen]

    def all(self) -> list[Partitioner]:
        """All partitioners."""
        return [self._spare, *self.partitioners]

    def forget(self) -> None:
        """Go back to before anything was measured."""
        self.measured.clear()
        self.taken.clear()
        for partitioner in self.all():
            partitioner.forget()

    def _unfitted(self) -> Rule:
        """What to do before anything was measured."""
        if len(self.partitioners) > 1:
            warnings.warn(
                "several modules are compiled with one byte budget, and how it is to be shared is known only once a step was seen: until "
                "lowtide.fit_compiled(model, step, options) each is compiled to need the least memory",
                stacklevel=2,
            )
            return Rule(lean=True)
        resident, device = _alive()
        if self.budget.bytes is not None:
            return Rule(allowed_bytes=self.budget.bytes - resident, must_fit=True)
        if self.budget.is_auto:
            return Rule(allowed_bytes=free_bytes(device), must_fit=True)
        raise InvalidInputError(
            "a budget that is a share needs a measured step to be a share of: give bytes, or call "
            "lowtide.fit_compiled(model, step, options) before the first step"
        )


def compile_options(budget: str | int | Budget, **others: Any) -> CompileOptions:
    """Options that have ``torch.compile`` keep the peak of forward and backward within a budget.

    What forward saves for backward is decided in the compiler, graph by graph. Pass the same options to ``torch.compile`` of a whole model,
    or to the ``compile`` of each of its blocks, and then call ``lowtide.fit_compiled(model, step, options)``: that measures real steps, and
    only what it leaves in force is sure to be within the budget. Without it, one compiled module is split by its simulated timeline,
    counting what is alive when it is first compiled; several are each compiled to need the least, with a warning.

    Args:
        budget: as for ``lowtide.fit``: bytes (``"4GiB"``), a share of the peak of the compiled step without a budget (``"50%"``, ``"50% of
            activations"``: of what it has alive beyond what is there before the step), or ``"auto"``.
        **others: further options of inductor.

    Raises:
        BudgetError: the budget cannot be read.
        InvalidInputError: this version of PyTorch has no place for a partitioner.
    """
    from torch._inductor import config

    if not hasattr(config, KEY):
        raise InvalidInputError(
            f"byte budgets for compiled models need inductor's option {KEY!r}, which PyTorch {torch.__version__} lacks: 2.11 has it"
        )
    return CompileOptions(parse_budget(budget), others)


def _alive() -> tuple[int, torch.device]:
    """Bytes alive now, and on which device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.device("cuda", torch.cuda.current_device())
        return torch.cuda.memory_allocated(device), device
    gc.collect()
    cpu = torch.device("cpu")
    return sum(live_storages(None, cpu).values()), cpu
