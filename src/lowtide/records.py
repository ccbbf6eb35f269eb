"""The frozen records that pass between packages. No torch here: a trace can be planned anywhere.

Time in a trace is counted in ops. A storage with ``born=3, freed=7`` holds its bytes while ops 3, 4, 5
and 6 run. Whatever is freed between op 6 and op 7 has ``freed=7``. A replay runs in the gap before the op
that needs it; what has ``freed`` equal to that op is gone by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Decision(str, Enum):
    """What becomes of a saved tensor between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    COMPRESS = "compress"


class Phase(str, Enum):
    """Where in the step an op ran."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Category(str, Enum):
    """What the bytes of a storage are for."""

    PARAMETER = "parameters"
    GRADIENT = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATION = "activations"
    TEMPORARY = "temporaries"
    INPUT = "inputs"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator call of the step, below autograd (``aten.addmm.default``).

    Attributes:
        name: operator with overload.
        phase: forward, backward or optimizer.
        call: index into ``StepTrace.calls`` of the innermost module call it ran in; ``None`` outside.
        source: the user's line, ``file.py:12``; empty when there is none.
        seconds: time of the kernel.
        workspace_bytes: bytes alive only while it ran, beyond what it returned.
        random: it drew from a random generator.
        reads, writes: storages it read, and storages it changed in place.
    """

    name: str
    phase: Phase
    call: int | None
    source: str
    seconds: float
    workspace_bytes: int
    random: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation. Its lifetime here is the natural one: without what autograd saved of it.

    Attributes:
        bytes: size as the device's allocator counts it.
        category: what it is for.
        born: op that allocated it; 0 for what was there before the step (``resident``).
        freed: first op before which it is gone, were nothing saved for backward;
            ``len(trace.ops)`` when it outlives the step.
        resident: it was there before the step.
    """

    bytes: int
    category: Category
    born: int
    freed: int
    resident: bool


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor that autograd saved in forward for one backward node.

    Attributes:
        storage: the storage it keeps alive.
        bytes: of the tensor itself (a view may be smaller than its storage).
        call: innermost module call in which it was saved; ``None`` outside any.
        position: ops with an index below this must have run before it can be saved; a replay that
            needs it runs the ops of its region up to here.
        used: op before which backward first asked for it; ``None`` if it never did.
        released: first op before which autograd had let go of it.
        node: the backward node, e.g. ``AddmmBackward0``.
    """

    storage: int
    bytes: int
    call: int | None
    position: int
    used: int | None
    released: int
    node: str


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module's forward: a region that could be replayed.

    Attributes:
        path: the module's path in the model, ``blocks.3.mlp`` (the root is the empty path).
        type: class name of the module.
        parent: index of the enclosing call; ``None`` for a call from the step itself.
        start, end: it ran the ops ``start <= i < end``.
        inputs, outputs: storages of its tensor arguments and of its results.
        replayable: replaying it is known to be allowed.
    """

    path: str
    type: str
    parent: int | None
    start: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    replayable: bool = True


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The record of one un-checkpointed step.

    Attributes:
        ops: in the order they ran.
        storages, saved, calls: what they refer to, by index. ``calls`` is in order of entry.
        fingerprint: of the model's structure, see ``lowtide.policy.fingerprint``.
        device: where the counted bytes live, ``cpu`` or ``cuda:0``.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: tuple[SavedTensor, ...]
    calls: tuple[Call, ...]
    fingerprint: str
    device: str
