"""What one block of a transformer keeps for backward, term by term.

For the classic block (two norms with shift, dropout, a GELU MLP four times as wide, ``math`` attention) the terms add up to the closed
forms of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4: with s tokens a
sample, b samples, h the width, a heads and t ranks of tensor parallelism, in half precision

    s b h (34 + 5 a s / h)                 on one rank              (equation 1)
    s b h (10 + 24 / t + 5 a s / (h t))    tensor parallel          (equation 2)
    s b h / t (34 + 5 a s / h)             with sequence parallel   (equation 4)

and without the terms that selective replay drops, ``34 s b h / t``. Grouped queries, gated MLPs, mixtures and fused attention
are counted by the same rules: what each op of the block saves, once, where no other op has saved it. What is smaller by the width (the
statistics of norms) is left out there and here; the log-sum of fused attention is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.distributed._architecture import Architecture
from lowtide.distributed._setup import Setup

BY_TENSOR, BY_POSITION = "tensor", "position"


@dataclass(frozen=True, slots=True)
class Term:
    """Tensors of one kind.

    Attributes:
        name: what they are.
        bytes: on one rank.
        core: made between queries, keys and values and attention's result: what selective replay drops.
        part: ``"attention"``, ``"mlp"``, ``"norm"``: the part of the block that saves it.
    """

    name: str
    bytes: float
    core: bool
    part: str


def layer_terms(model: Architecture, setup: Setup) -> tuple[Term, ...]:
    """What one block keeps of one micro-batch on one rank."""
    return tuple(_Counter(model, setup).terms())


def layer_input_bytes(model: Architecture, setup: Setup) -> float:
    """What a block that is replayed whole keeps: its input."""
    return _Counter(model, setup).bytes_of(model.width, BY_POSITION)


class _Counter:
    def __init__(self, model: Architecture, setup: Setup) -> None:
        self.model, self.setup = model, setup
        self.dropout = model.dropout

    def bytes_of(self, entries: float, split: str, value_bytes: int | None = None) -> float:
        """Bytes of a tensor with so many entries a token."""
        setup = self.setup
        parts = setup.mesh.tp if split == BY_TENSOR or setup.sequence_parallel else 1
        return setup.tokens * entries * (setup.value_bytes if value_bytes is None else value_bytes) / parts

    def terms(self) -> Iterator[Term]:
        yield from self._norm("before attention", "attention")
        yield from self._attention()
        yield from self._norm("before the MLP", "mlp")
        yield from self._mixture() if self.model.experts > 1 else self._mlp(1)
        if self.dropout:
            yield Term("dropout mask of the MLP", self.bytes_of(self.model.width, BY_POSITION, 1), False, "mlp")

    def _norm(self, where: str, part: str) -> Iterator[Term]:
        width = self.model.width
        yield Term(f"input of the norm {where}", self.bytes_of(width, BY_POSITION), False, "norm")
        yield Term(f"normalised input of the {part}", self.bytes_of(width, BY_POSITION), False, part)

    def _attention(self) -> Iterator[Term]:
        model = self.model
        if model.qk_norm:
            yield Term(
                "queries and keys before their norm", self.bytes_of(model.attention_width + model.kv_width, BY_TENSOR), False, "norm"
            )
        yield Term("queries, keys, values", self.bytes_of(model.attention_width + 2 * model.kv_width, BY_TENSOR), False, "attention")
        yield from self._scores() if self.setup.attention == "math" else self._log_sum()
        yield Term("attention's result", self.bytes_of(model.attention_width, BY_TENSOR), False, "attention")
        if self.dropout:
            yield Term("dropout mask of attention", self.bytes_of(model.width, BY_POSITION, 1), False, "attention")

    def _scores(self) -> Iterator[Term]:
        """The matrices of scores: s entries a head and token."""
        entries = self.model.heads * self.setup.sequence
        yield Term("softmax", self.bytes_of(entries, BY_TENSOR), True, "attention")
        if self.dropout:
            yield Term("dropout mask of the softmax", self.bytes_of(entries, BY_TENSOR, 1), True, "attention")
            yield Term("softmax after dropout", self.bytes_of(entries, BY_TENSOR), True, "attention")

    def _log_sum(self) -> Iterator[Term]:
        yield Term("log-sum of the scores", self.bytes_of(self.model.heads, BY_TENSOR, 4), True, "attention")

    def _mlp(self, visits: int) -> Iterator[Term]:
        hidden = visits * self.model.hidden
        if not self.model.gated:
            yield Term("input of the activation", self.bytes_of(hidden, BY_TENSOR), False, "mlp")
        else:
            yield Term("gate, activated gate, and what it multiplies", self.bytes_of(3 * hidden, BY_TENSOR), False, "mlp")
        yield Term("input of the second matrix", self.bytes_of(hidden, BY_TENSOR), False, "mlp")

    def _mixture(self) -> Iterator[Term]:
        """Each token is gathered for every expert that it visits, and what they return is weighed."""
        model = self.model
        yield Term("router", self.bytes_of(2 * model.experts, BY_POSITION, 4), False, "mlp")
        yield Term("tokens gathered for the experts", self.bytes_of(model.experts_used * model.width, BY_POSITION), False, "mlp")
        yield from self._mlp(model.experts_used)
        yield Term("results of the experts", self.bytes_of(model.experts_used * model.width, BY_POSITION), False, "mlp")
