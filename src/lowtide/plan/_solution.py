"""A plan as a value: which regions are replayed, for which model, and what that was predicted to cost.

Plans travel between machines as JSON and are read by people, so a file is checked field by field before it is
believed: a plan that is applied to the wrong model, or with a decision misread, would cost memory or time in silence.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lowtide.errors import PlanError
from lowtide.plan import _json
from lowtide.plan._functions import FunctionPath
from lowtide.records import Decision

OPTIMAL = "optimal"
FEASIBLE = "feasible"


@dataclass(frozen=True, slots=True, order=True)
class KeptCall:
    """A call of a torch function inside a region whose results are kept, so that a replay does not run it.

    Attributes:
        module: path of the innermost module around the call.
        function: its qualified name, ``torch.nn.functional.softmax``.
        index: calls of the same function before it in the call of the region's member.
    """

    module: str
    function: str
    index: int


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """One region of a plan and what becomes of its saved tensors.

    Attributes:
        paths: of the module, or of several modules that are called one right after the other and are replayed as one. Calls of functions
            that a module makes between those inside it may be among them: ``up.0:torch.nn.functional.silu[1]`` is the second call of
            ``silu`` in a call of ``up.0``.
        decision: the decision covers every call of these modules.
        kept: calls in it whose results are kept all the same.
        inside: regions in it that are replayed on their own: it hands them their inputs, which is all that its replay makes of them.
        first_saved: of the tensors that autograd saves in a call of it, how many are dropped, from the first on: those after them are kept
            as they are, and the replay ends before it gets there. ``None`` for all.

    Raises:
        PlanError: no path, or one path twice; a region inside that reaches beyond this one, is all of it, overlaps another, or is kept;
            two of kept calls, regions inside and ``first_saved``, or any of them in a region inside that keeps calls or tensors.
    """

    paths: tuple[str, ...]
    decision: Decision = Decision.RECOMPUTE
    kept: tuple[KeptCall, ...] = ()
    inside: tuple[PlannedRegion, ...] = ()
    first_saved: int | None = None

    def __post_init__(self) -> None:
        if not self.paths:
            raise PlanError("a region of the plan names no module: give it one path or more")
        if self.first_saved is not None and (self.first_saved < 1 or self.kept or self.inside):
            raise PlanError(
                f"region {self.paths} of the plan drops only its first saved tensors: that is one at least, and with nothing kept or inside"
            )
        if len(set(self.paths)) != len(self.paths):
            raise PlanError(f"region {self.paths} of the plan names a module twice: name each once")
        if self.inside:
            self._check_inside()

    def _check_inside(self) -> None:
        refuse_nested_paths(path for region in self.inside for path in region.paths)
        for region in self.inside:
            if region.paths == self.paths:
                raise PlanError(f"region {self.paths} of the plan has itself inside: name part of it")
            for path in region.paths:
                if not {path, *ancestors(path)} & set(self.paths):
                    raise PlanError(f"region {region.paths} of the plan is inside {self.paths}, but {path!r} is not")
            if region.decision is not Decision.RECOMPUTE:
                raise PlanError(
                    f"region {region.paths} is inside another of the plan and is to be {region.decision.value}: only replays nest"
                )
        if self.kept or any(region.kept or region.first_saved is not None for region in self.inside):
            raise PlanError(f"region {self.paths} of the plan has regions inside and kept calls or tensors: it can have one or the other")


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions for a whole model.

    Attributes:
        regions: none inside another, but for those that one has ``inside``.
        fingerprint: of the model's structure; the plan is for models that have the same.
        budget_bytes: the peak that was allowed.
        predicted_peak_bytes, predicted_step_s: by ``simulate`` on the trace it was made from.
        predicted_replay_s: what replays add to the step, what the engine takes for them included.
        solver: name of what found it.
        status: ``"optimal"`` when it was proved that no faster plan fits the budget, ``"feasible"`` otherwise.
        gap: how much faster a plan could be at most, as a share of ``predicted_replay_s``; ``None`` if unknown.
        device: where the trace was taken.
        torch_version: of the trace; empty if unknown.

    Raises:
        PlanError: two regions overlap, or the status is unknown.
    """

    regions: tuple[PlannedRegion, ...]
    fingerprint: str
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_step_s: float
    predicted_replay_s: float
    solver: str
    status: str = FEASIBLE
    gap: float | None = None
    device: str = ""
    torch_version: str = ""

    def __post_init__(self) -> None:
        if self.status not in (OPTIMAL, FEASIBLE):
            raise PlanError(f"the status of a plan is {OPTIMAL!r} or {FEASIBLE!r}, not {self.status!r}")
        refuse_nested_paths(path for region in self.regions for path in region.paths)

    def check_fingerprint(self, fingerprint: str) -> None:
        """Refuse a model of another structure.

        Raises:
            PlanError: the fingerprint is not that of the plan.
        """
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"the plan was made for another model: its fingerprint is {self.fingerprint!r}, that of this model {fingerprint!r}; "
                "make a plan for this model"
            )

    def to_json(self) -> str:
        """Write as JSON, readable and with a version."""
        return json.dumps(_json.encode(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what ``to_json`` wrote.

        Raises:
            PlanError: not JSON, not a plan, of another version, or a field that is missing, unknown or of the wrong type.
        """
        return _json.decode(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file. It is replaced as a whole: a reader never sees half a plan.

        Raises:
            PlanError: the file cannot be written.
        """
        target = Path(path)
        try:
            _replace(target, self.to_json())
        except OSError as error:
            raise PlanError(f"cannot write the plan to {target}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a file that ``save`` wrote.

        Raises:
            PlanError: it cannot be read, or is no plan of this version; the message names the file.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"{path} is damaged or no plan: it is not text in UTF-8 (byte {error.start})") from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def _replace(target: Path, text: str) -> None:
    handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, target)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The mask of this process; the system tells it only in exchange for another."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def refuse_nested_paths(paths: Iterable[str]) -> None:
    """Check that no path is given twice or lies inside another.

    Raises:
        PlanError: the regions overlap.
    """
    given: set[str] = set()
    for path in paths:
        if path in given:
            raise PlanError(f"regions of the plan overlap: {path!r} is in two of them")
        given.add(path)
    for path in sorted(given):
        for outer in (a for a in ancestors(path) if a in given):
            raise PlanError(f"regions of the plan overlap: {path!r} lies inside {outer!r}; keep one of them")


@cache
def ancestors(path: str) -> tuple[str, ...]:
    """Paths of the modules around this one, the root first; of a call of a function, the module that makes it is one.

    >>> ancestors("blocks.0.mlp")
    ('', 'blocks', 'blocks.0')
    """
    function = FunctionPath.read(path)
    if function is not None:
        return (*ancestors(function.caller), function.caller)
    if not path:
        return ()
    parts = path.split(".")
    return ("", *(".".join(parts[:i]) for i in range(1, len(parts))))
