"""The frozen records of a step.

Time in a trace is counted in ops. A storage with ``born=3, freed=7`` holds its bytes while ops 3, 4, 5
and 6 run. Whatever is freed between op 6 and op 7 has ``freed=7``. A replay runs in the gap before the op
that needs it; what has ``freed`` equal to that op is gone by then.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from lowtide.records import _file, _json

MEASURED = "measured"
"""The ``timing`` of a trace whose times were taken while the ops ran."""


class Decision(str, Enum):
    """What becomes of a saved tensor between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    COMPRESS = "compress"


class Phase(str, Enum):
    """Where in the step an op ran. A replay is a forward that runs again in backward, under whichever library."""

    FORWARD = "forward"
    REPLAY = "replay"
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
        call: index into ``StepTrace.calls`` of the innermost module call it ran in; ``None`` outside. For an op of
            backward, the call of its ``origin``.
        source: the user's line, ``file.py:12``; empty when there is none. For an op of backward, that of its ``origin``.
        seconds: time of the kernel, by a cost model or measured (``StepTrace.timing``): then the median of all of its kind and shapes.
        workspace_bytes: bytes alive only while it ran, beyond what it returned.
        random: it drew from a random generator.
        reads, writes: storages it read, and storages it changed in place.
        born_bytes: bytes of the storages that it allocated and returned.
        collective: it communicates with other processes.
        origin: for an op that ran for a backward node, the op in whose course autograd made that node, where it is known.
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
    born_bytes: int = 0
    collective: bool = False
    origin: int | None = None


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
        node: the backward node, e.g. ``AddmmBackward0``; empty if backward never asked for it.
        dtype: of the tensor, ``float32``.
        shape: of the tensor.
        shared: somebody besides autograd may hold this very tensor when backward asks for it, as long as its storage lives. Where it
            is false, the tensor was gone by then, though a view of it (``y.detach()`` kept by a module) may keep its storage.
        at_end: ops of the function call that saved it had run by then, so that where two calls meet at ``position`` it is of the first.
    """

    storage: int
    bytes: int
    call: int | None
    position: int
    used: int | None
    released: int
    node: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    shared: bool = True
    at_end: bool = False


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
        replaced: storages that were there before it and were let go of while it ran, such as what an attribute held that was given another
            value. A region holds them: its replay may read them.
    """

    path: str
    type: str
    parent: int | None
    start: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    replayable: bool = True
    replaced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a torch function in a module's forward: a region may keep its results, and then a replay does not run it.

    Attributes:
        function: its qualified name, ``torch.nn.functional.softmax``.
        call: index of the innermost module call around it.
        start, end: it ran the ops ``start <= i < end``.
        outputs: storages of its results; none where it ran no op, or recorded no gradients.
    """

    function: str
    call: int
    start: int
    end: int
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """Parameters spread over processes that are fetched whole before a module's call, whenever that runs.

    A region around the call fetches them in its replay too, unless they are whole then. What a replay fetched stays whole until backward is
    through with it, which then fetches nothing itself.

    Attributes:
        call: index into ``StepTrace.calls``.
        storages: what holds them whole during the call in forward.
        seconds: how long it takes to fetch them.
        whole_from, whole_until: they are whole anyway while ops ``whole_from <= i < whole_until`` of backward run; where backward never
            fetches them both are the end of backward.
    """

    call: int
    storages: tuple[int, ...]
    seconds: float
    whole_from: int
    whole_until: int

    def is_whole(self, op: int) -> bool:
        """Whether nothing is fetched in the gap before this op."""
        return self.whole_from <= op < self.whole_until

    @property
    def is_extra(self) -> bool:
        """Whether a step in which a replay fetches them fetches them once more than one without."""
        return self.whole_from == self.whole_until


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The record of one step.

    Attributes:
        ops: in the order they ran.
        storages, saved, calls: what they refer to, by index. ``calls`` is in order of entry.
        fingerprint: of the model's structure, see ``lowtide.policy.fingerprint``.
        device: where the counted bytes live, ``cpu`` or ``cuda:0``.
        torch_version: of the torch that ran the step; empty if unknown.
        fake: it was recorded under fake tensors: nothing was computed.
        timing: where the times of the ops come from: ``measured``, or the name of a GPU whose cost model gave them.
        functions: calls of torch functions, in order; none in traces that older versions wrote.
        gathers: calls before which parameters are fetched from other processes, in order of ``calls``.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saved: tuple[SavedTensor, ...]
    calls: tuple[Call, ...]
    fingerprint: str
    device: str
    torch_version: str = ""
    fake: bool = False
    timing: str = MEASURED
    functions: tuple[FunctionCall, ...] = ()
    gathers: tuple[Gather, ...] = ()

    @property
    def resident_bytes(self) -> int:
        """Bytes that were there before the step and are the step's: of model, optimizer, and whatever else it uses or lets go of."""
        return sum(storage.bytes for storage in self.storages if storage.resident)

    def to_json(self) -> str:
        """Write as JSON with a version: columns and one table of texts, some 100 bytes an op."""
        return _json.encode(self)

    @classmethod
    def from_json(cls, text: str) -> StepTrace:
        """Read what ``to_json`` wrote.

        Raises:
            TraceError: not JSON, not a trace, of another version, or with a field that is missing, unknown, of the wrong
                type or out of range.
        """
        return _json.decode(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file. It is replaced as a whole: a reader never sees half a trace.

        Raises:
            TraceError: the file cannot be written.
        """
        _file.write(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StepTrace:
        """Read from a file. Needs no torch.

        Raises:
            TraceError: the file cannot be read, or ``from_json`` refuses it.
        """
        return cls.from_json(_file.read(path))
