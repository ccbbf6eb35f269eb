"""From a target or a trace's file to a trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lowtide.cli._streams import output_kept_clean, progress
from lowtide.cli._target import loaded
from lowtide.records import StepTrace
from lowtide.report import Subject

TARGET_OR_TRACE = (
    "gpt, resnet or unet, or path/to/script.py:function or package.module:function, where the function returns a lowtide.Workload; "
    "or a file that `lowtide trace` wrote."
)


@dataclass(frozen=True, slots=True)
class How:
    """How to trace: the options of ``lowtide.trace``."""

    offload: bool = False
    fake: bool = False
    device: str | None = None
    gpu: str | None = None


def read_or_traced(target: str) -> tuple[StepTrace, Subject]:
    """The trace in a file, or one made of the target's step; with what it is of.

    Raises:
        TraceError: the file cannot be read, or is no trace.
        TargetError: there is no such target.
        StepError: its step cannot be traced.
        Exception: whatever the user's code raises.
    """
    if target.endswith(".json"):
        return StepTrace.load(target), Subject(target.removesuffix(".json"))
    return traced(target)


def traced(target: str, how: How = How()) -> tuple[StepTrace, Subject]:
    """A trace of the target's step.

    Raises:
        TargetError: there is no such target.
        InvalidInputError: options that do not go together.
        StepError: its step cannot be traced.
        Exception: whatever the user's code raises.
    """
    from lowtide.trace import trace

    say = progress()
    say(f"loading {target}")
    with output_kept_clean(), loaded(target) as workload:
        say("tracing a step")
        found = trace(workload.model, workload.step, **asdict(how))
    say("traced")
    return found, Subject(workload.name or target, workload.tokens_per_step)
