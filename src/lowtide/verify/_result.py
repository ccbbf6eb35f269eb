"""What a verification found, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import VerificationError
from lowtide.verify._difference import Difference


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """The first op of a region whose replay made other values than its forward.

    Attributes:
        region: its name.
        op: ``aten.native_dropout.default``; empty where it is not known.
        source: the user's line that called it, ``file.py:12``; empty where it is not known.
    """

    region: str
    op: str
    source: str

    @property
    def text(self) -> str:
        """The difference in a few words."""
        return f"{self.op or 'an unknown op'}{f' at {self.source}' if self.source else ''} in region {self.region!r}"


@dataclass(frozen=True, slots=True)
class Precision:
    """How far autocast takes a step from FP32, without and with checkpointing.

    Attributes:
        dtype: of autocast.
        worst: the loss, output or gradient that autocast moves furthest, without checkpointing.
        plain: how far that is, as in ``Difference.distance``.
        checkpointed: the same tensor, with checkpointing.
    """

    dtype: str
    worst: str
    plain: float
    checkpointed: float

    @property
    def text(self) -> str:
        """That in a sentence."""
        both = f"{self.plain:.2g} without checkpointing, {self.checkpointed:.2g} with it"
        return f"against FP32, {self.dtype} moves {self.worst} most: by {both}"


@dataclass(frozen=True, slots=True)
class Verification:
    """How a checkpointed step compares with the plain one.

    Attributes:
        equal: everything compared is the same, to the last bit, or within the plain step's own difference
            from itself where it is not repeatable.
        repeatable: plain runs from the same state were the same bit for bit.
        compared: number of tensors compared: loss, outputs, gradients, parameters, buffers, optimizer and random state.
        gradients: how many of them are gradients of the first step.
        different: names of the tensors that differ, the worst of the first step that differs first.
        summary: the verdict in one sentence.
        worst: the tensor that differs most in the first step that differs.
        replays: where replays made other values than their forwards, in the order of the forwards. Looked for where something
            differs or the plain step does not repeat itself.
        regions: names of the regions that ran.
        steps: how many training steps were compared.
        unsteady: the tensor in which the plain step differs most from itself.
        precision: with ``three_way``, what autocast does by itself.
        error: what the checkpointed step raised; the plain step did not.
        ranks: the verdict of each process, where several verify together.
    """

    equal: bool
    repeatable: bool
    compared: int
    gradients: int
    different: tuple[str, ...]
    summary: str
    worst: Difference | None = None
    replays: tuple[ReplayDifference, ...] = ()
    regions: tuple[str, ...] = ()
    steps: int = 1
    unsteady: Difference | None = None
    precision: Precision | None = None
    error: str = ""
    ranks: tuple[str, ...] = ()

    @property
    def first_op(self) -> ReplayDifference | None:
        """The first op whose replay differs from its forward, if any does."""
        return self.replays[0] if self.replays else None

    def raise_if_different(self) -> None:
        """Raise ``VerificationError`` with the report unless the two steps were equal."""
        if not self.equal:
            raise VerificationError(self.report())

    def report(self) -> str:
        """What was found, in a few lines."""
        lines = [self.summary]
        if self.worst is not None:
            lines.append(f"worst: {self.worst.text}" + (f", of region {self.worst.region!r}" if self.worst.region else ""))
        if self.unsteady is not None:
            lines.append(f"the plain step differs from itself, most in {self.unsteady.text}")
        if self.replays:
            lines.append(f"the first op whose replay differs: {self.replays[0].text}")
        elif not self.equal and not self.error:
            lines.append("every replay that could be checked made what its forward had: what differs is no saved tensor")
        if self.precision is not None:
            lines.append(self.precision.text)
        lines += [f"rank {rank}: {verdict}" for rank, verdict in enumerate(self.ranks)]
        return "\n".join(lines)


def summary_of(different: tuple[Difference, ...], compared: int, gradients: int, steps: int, *, repeatable: bool) -> str:
    """The verdict in one sentence."""
    what = f"{compared} tensors ({gradients} gradients)" + (f" over {steps} steps" if steps > 1 else "")
    if different:
        others = f" and {len(different) - 1} more" if len(different) > 1 else ""
        verdict = f"the planned step differs from the plain one in {different[0].text}{others}, of {what} compared"
        return verdict if repeatable else f"further from the plain step than that from itself: {verdict}"
    if repeatable:
        return f"equal to the last bit: {what}"
    return f"within the plain step's own difference from itself (it is not repeatable): {what}"
