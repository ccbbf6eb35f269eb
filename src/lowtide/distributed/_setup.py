"""How a model is trained, as far as the memory of one rank depends on it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from lowtide.errors import InvalidInputError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
ATTENTION = ("fused", "math")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks by what they split: the batch (``dp``), the layers (``pp``), each layer (``tp``)."""

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __str__(self) -> str:
        return f"dp={self.dp},pp={self.pp},tp={self.tp}"


def parse_mesh(text: str) -> Mesh:
    """Read a mesh.

    Raises:
        InvalidInputError: it names what is no dimension, or a size below one.

    >>> parse_mesh("dp=8,tp=2")
    Mesh(dp=8, pp=1, tp=2)
    """
    sizes: dict[str, int] = {}
    known = [field.name for field in fields(Mesh)]
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*=\s*(\d+)", part)
        if match is None or match[1] not in known or match[1] in sizes or int(match[2]) < 1:
            raise InvalidInputError(
                f"cannot read {part!r} in the mesh {text!r}: write sizes such as dp=8,pp=4,tp=2, each once and above zero"
            )
        sizes[match[1]] = int(match[2])
    return Mesh(**sizes)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is trained.

    Attributes:
        sequence: tokens of one sample.
        micro_batch: samples that a rank takes at once.
        micro_batches: how many of them make a step; what is in flight in a pipeline depends on it.
        mesh: the ranks.
        zero: 0 to 3: what of the optimizer state (1), gradients (2) and parameters (3) is split over ``dp``.
        schedule: of the pipeline.
        chunks: stages that each rank holds in an interleaved schedule.
        sequence_parallel: what ``tp`` does not split (norms, residuals, dropout) is split by position.
        attention: ``"fused"`` never has the matrix of scores, ``"math"`` has it.
        value_bytes: of an activation and of a working parameter: 2 in half precision, 4 in single.
        gradient_bytes: of a gradient that is accumulated.
        optimizer_bytes: of optimizer state a parameter: 12 is a single-precision copy with both moments of Adam, 8 the moments alone.
    """

    sequence: int
    micro_batch: int = 1
    micro_batches: int = 1
    mesh: Mesh = Mesh()
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    sequence_parallel: bool = False
    attention: str = "fused"
    value_bytes: int = 2
    gradient_bytes: int = 2
    optimizer_bytes: int = 12

    def __post_init__(self) -> None:
        for name in ("sequence", "micro_batch", "micro_batches", "chunks", "value_bytes"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is a whole number above zero; found {getattr(self, name)}")
        _one_of("zero", self.zero, (0, 1, 2, 3))
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("attention", self.attention, ATTENTION)
        if self.chunks > 1 and self.schedule != "interleaved":
            raise InvalidInputError(f"{self.chunks} chunks a rank make an interleaved schedule, not {self.schedule!r}")

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequence * self.micro_batch


def _one_of(name: str, found: object, known: tuple[object, ...]) -> None:
    if found not in known:
        raise InvalidInputError(f"{name} is one of {', '.join(map(str, known))}; found {found!r}")
