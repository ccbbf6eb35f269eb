"""The moment of most bytes: when it is, and what was alive then, by category and by owner."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.explain._step import StepView, node_of, path_name
from lowtide.plan import simulate
from lowtide.records import Category, Phase, StepTrace

RESIDENT = "there before the step"
IN_USE = "in use"
SAVED = "saved for backward"
WORKSPACE = "workspace of the op"


@dataclass(frozen=True, slots=True)
class AliveStorage:
    """One storage at the peak, or what the op that runs then needs inside.

    Attributes:
        storage: index in the trace; ``None`` for what only the op itself has.
        bytes: its size.
        category: what it is for.
        owner: path of the module that made it (that first used it, where it was there before the step).
        made_by: the op that allocated it; empty for what was there before.
        source: the line of that op.
        because: ``"there before the step"``, ``"in use"``, ``"saved for backward"`` when only autograd keeps it, or
            ``"workspace of the op"``.
        nodes: the backward nodes that keep it.
    """

    storage: int | None
    bytes: int
    category: Category
    owner: str
    made_by: str
    source: str
    because: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Owner:
    """What one module holds of one category at the peak."""

    path: str
    category: Category
    bytes: int
    storages: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of most bytes.

    Attributes:
        bytes: alive then.
        op: index of the op that ran.
        op_name, path, source: which it was, the module it worked for, and its line.
        phase: of the step.
        start_s, step_s: when it began, and how long the step takes.
        categories: bytes by category, most first.
        owners: bytes by module and category, most first; the op's workspace is with its module.
        storages: what was alive, the largest first; they sum up to ``bytes``.
        workspace_bytes: what the op needed only while it ran; one of the storages.
    """

    bytes: int
    op: int
    op_name: str
    path: str
    source: str
    phase: Phase
    start_s: float
    step_s: float
    categories: tuple[tuple[Category, int], ...]
    owners: tuple[Owner, ...]
    storages: tuple[AliveStorage, ...]
    workspace_bytes: int

    def of(self, category: Category) -> int:
        """Bytes of one category."""
        return dict(self.categories).get(category, 0)


def peak(trace: StepTrace) -> Peak:
    """Explain the moment of most bytes of a step without a plan.

    Args:
        trace: of the step; it has at least one op.
    """
    simulation = simulate(trace, None)
    return moment(StepView(trace), int(simulation.timeline.op[simulation.peak_moment]))


def moment(view: StepView, at: int) -> Peak:
    """The same for any op."""
    ops = view.trace.ops
    op = ops[at]
    storages = [_alive(view, storage, at) for storage in view.alive_at(at)]
    start_s = sum((o.seconds for o in ops[:at]), start=0.0)
    where = path_name(view.path_of_op(at))
    source = op.source or _line_of_forward(view, at)
    if op.workspace_bytes:
        storages.append(AliveStorage(None, op.workspace_bytes, Category.TEMPORARY, where, op.name, source, WORKSPACE, ()))
    alive = tuple(sorted(storages, key=lambda storage: -storage.bytes))
    return Peak(
        bytes=sum(storage.bytes for storage in alive),
        op=at,
        op_name=op.name,
        path=where,
        source=source,
        phase=op.phase,
        start_s=start_s,
        step_s=start_s + sum((o.seconds for o in ops[at:]), start=0.0),
        categories=_by_category(alive),
        owners=_by_owner(alive),
        storages=alive,
        workspace_bytes=op.workspace_bytes,
    )


def _alive(view: StepView, storage: int, at: int) -> AliveStorage:
    record, maker = view.trace.storages[storage], view.maker(storage)
    because = RESIDENT if record.resident else IN_USE if at < record.freed else SAVED
    nodes = dict.fromkeys(node_of(view.trace.saved[slot]) for slot in view.slots_of_storage.get(storage, []))
    name, source = (maker.name, maker.source) if maker else ("", "")
    return AliveStorage(storage, record.bytes, record.category, path_name(view.owner(storage)), name, source, because, tuple(nodes))


def _line_of_forward(view: StepView, at: int) -> str:
    """An op of backward has no line of the user; the one where its module last ran in forward stands for it."""
    path = view.path_of_op(at)
    lines = (op.source for op in reversed(view.trace.ops[:at]) if op.source and view.path_of_call(op.call) == path)
    return next(lines, "") if view.trace.ops[at].phase is Phase.BACKWARD else ""


def _by_category(alive: tuple[AliveStorage, ...]) -> tuple[tuple[Category, int], ...]:
    found = dict.fromkeys(Category, 0)
    for storage in alive:
        found[storage.category] += storage.bytes
    return tuple(sorted(((c, size) for c, size in found.items() if size), key=lambda entry: -entry[1]))


def _by_owner(alive: tuple[AliveStorage, ...]) -> tuple[Owner, ...]:
    found: dict[tuple[str, Category], list[int]] = {}
    for storage in alive:
        found.setdefault((storage.owner, storage.category), []).append(storage.bytes)
    owners = (Owner(path, category, sum(sizes), len(sizes)) for (path, category), sizes in found.items())
    return tuple(sorted(owners, key=lambda owner: -owner.bytes))
