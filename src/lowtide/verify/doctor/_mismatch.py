"""The step fails, for shapes or counts of a replay are not those of its forward."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from lowtide.errors import ReplayMismatchError
from lowtide.torch_compat import CheckpointError
from lowtide.verify.doctor._examination import Examination
from lowtide.verify.doctor._finding import Finding, Severity

_ENGINE = "with lowtide.torch_compat.substituted(): …, whose replays find it as it was"
_ROUTING = ("topk", "nonzero", "masked_select", "bincount", "sort", "one_hot")

_JOINING = ("aten.cat", "aten.stack", "aten.index_copy")
_DTYPE = re.compile(r"'dtype': torch\.(\w+)")
_UNPACKED_TWICE = "already unpacked once"
"""A backward that reads what it saved a second time: nothing in the replay differs."""


def find(exam: Examination) -> Iterator[Finding]:
    """The error with its likeliest cause."""
    error = exam.look.error
    moved = bool(exam.look.flipped) or exam.look.dtypes is not None
    if error is None or _UNPACKED_TWICE in str(error) or not (moved or isinstance(error, (CheckpointError, ReplayMismatchError))):
        return
    symptom, what, mend = _cause(exam, str(error))
    first = "".join(f"first op that differs: {replay.text}; " for replay in exam.replays[:1])
    yield Finding(symptom, Severity.ERROR, what, f"{first}{type(error).__name__}: {' '.join(str(error).split())[:400]}", mend)


def _cause(exam: Examination, text: str) -> tuple[str, str, str]:
    first = exam.replays[0].op if exam.replays else ""
    cached = _cache_on(exam.model) if not first or first.startswith(_JOINING) else None
    if exam.look.flipped:
        name = next(iter(exam.look.flipped))
        what = f"the module {name or '(model)'!r} is in another training mode in the replay than it was in its forward"
        return "mismatch: mode flipped", what, "call model.train() or .eval() after backward, not before it"
    if exam.look.dtypes is not None:
        then, now = exam.look.dtypes
        what = f"the default dtype was {then} in forward and is {now} in the replay"
        return "mismatch: dtype context", what, f"set the default dtype around the whole step; or {_ENGINE}"
    if cached is not None or "a cache or list" in text:
        what = f"{cached or 'a region'} appends to a cache of keys and values, in forward and again in each replay"
        return "mismatch: cache on", what, "model.config.use_cache = False while training"
    if any(name in f"{text} {first}" for name in _ROUTING) or _routes(exam.model):
        what = "a router chooses by values that a replay does not make again to the bit"
        return "mismatch: routing", what, "keep the router's choice, or leave the router out of the region"
    dtypes = _DTYPE.findall(text)  # torch names those of the forward and of the replay in turns
    if "another dtype context" in text or dtypes[::2] != dtypes[1::2]:
        return "mismatch: dtype context", "a replay runs under another dtype context than its forward", _ENGINE
    return (
        "mismatch",
        "a replay does not do what its forward did",
        "lowtide verify TARGET names op and line",
    )


def _cache_on(model: nn.Module) -> str | None:
    for path, module in model.named_modules():
        for owner in (module, getattr(module, "config", None)):
            if getattr(owner, "use_cache", False) is True:
                return f"{path or type(module).__name__} has use_cache=True and"
    return None


def _routes(model: nn.Module) -> bool:
    names = ("router", "gate", "moe", "expert")
    return any(any(name in type(module).__name__.lower() for name in names) for module in model.modules())
