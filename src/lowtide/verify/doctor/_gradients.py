"""The same loss, but other gradients, buffers or random state."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.verify._result import Verification
from lowtide.verify.audit import Kind
from lowtide.verify.doctor._examination import Examination
from lowtide.verify.doctor._finding import Finding, Severity

_RANDOM_OPS = ("bernoulli", "dropout", "rand", "normal_", "uniform_", "exponential_", "multinomial")
_ENGINE = "run it on lowtide's engine, which restores that: with lowtide.torch_compat.substituted(): …"


def find(exam: Examination) -> Iterator[Finding]:
    """What differs from the plain step, by its likeliest cause."""
    found = exam.verification
    if found is None or found.equal or found.error:
        return
    name, what, mend = _cause(exam, found)
    same = "" if any(n.startswith(("loss", "output ")) for n in found.different) else "the loss is the same, but "
    evidence = found.report().replace("\n", "; ")
    yield Finding(name, Severity.ERROR, f"{same}{found.worst.name if found.worst else 'something'} differs: {what}", evidence, mend)


def _cause(exam: Examination, found: Verification) -> tuple[str, str, str]:
    op = found.first_op.op if found.first_op else ""
    careless = any(not region.preserve_rng_state for region in exam.look.torch_calls)
    if any(name in op for name in _RANDOM_OPS) or any(name.startswith("random state") for name in found.different):
        mend = "preserve_rng_state=True" if careless else f"draw from a generator of the module; {_ENGINE}"
        return "other gradients: random state", "a replay draws other random numbers than its forward", mend
    buffers = [name for name in found.different if name.startswith("buffer ")]
    if buffers:
        return "other gradients: buffers", f"{buffers[0]} is updated by the forward and again by each replay", _ENGINE
    risks = [risk for _, risk in exam.audit.risks if risk.kind is not Kind.REPLAY] if exam.audit else []
    if risks:
        mend = f"lowtide.checkpoint in place of torch's, and: {risks[0].how}" if exam.look.torch_calls else risks[0].how
        return "other gradients: side effects", f"{risks[0].kind.value} in a region: {risks[0].what}", mend
    return (
        "other gradients",
        "a replay does not compute what its forward did",
        "lowtide audit TARGET, and look at the op that differs first",
    )
