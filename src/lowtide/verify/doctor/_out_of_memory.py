"""The step does not fit, checkpointed or not."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.explain import Peak, out_of_memory, peak
from lowtide.units import format_bytes
from lowtide.verify.doctor._examination import Examination
from lowtide.verify.doctor._finding import Finding, Severity


def find(exam: Examination) -> Iterator[Finding]:
    """The stage and the tensor that are the peak, where that is over the limit."""
    trace = exam.as_it_is or exam.plain
    if exam.limit_bytes is None or trace is None:
        return
    over = out_of_memory(trace, exam.limit_bytes)
    if over is not None:
        top = peak(trace)
        what = f"the step needs {format_bytes(top.bytes)} of {format_bytes(exam.limit_bytes)}; most at its peak is {_largest(top)}"
        yield Finding("still out of memory", Severity.ERROR, what, over.summary(), f"lowtide fit TARGET --budget {exam.limit_bytes}")


def _largest(top: Peak) -> str:
    storage = top.storages[0]
    made = f"made by {storage.made_by} ({storage.source or storage.owner})" if storage.made_by else f"of {storage.owner}"
    return f"{format_bytes(storage.bytes)} of {storage.category.value}, {made}, in {top.phase.value}"
