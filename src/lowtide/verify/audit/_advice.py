"""How each kind of thing is handled, or what to do about it."""

from __future__ import annotations

from lowtide.verify.audit._records import Kind, Observation

_HANDLED = {
    Kind.RANDOM: "its state is taken with each call, and restored for the replay",
    Kind.BUFFER: "it is copied before it is written; a replay writes to another copy, so that it ends as after one forward",
    Kind.ATTRIBUTE: "a replay sees what it was, and it ends as after one forward",
    Kind.AMBIENT: "it is captured with each call, and restored for the replay",
    Kind.INPUT: "it is copied before it is written, and the replay is given a copy",
    Kind.DEVICE: "a replay moves it again; the generator of that device is guarded",
    Kind.CONTROL_FLOW: "a replay has the same inputs and goes the same way; each way is learned by itself",
}
_RISKS = {
    Kind.GLOBAL: "each replay changes it again: change it only `if not lowtide.is_replaying()`, or keep it on the module",
    Kind.COLLECTIVE: "each replay communicates again: end the region before it, or keep its result; all processes must replay alike",
    Kind.DEVICE: "guards do not take the random state of this device: draw no random numbers on it in the region",
    Kind.NONDETERMINISTIC: "a replay may make other values: torch.use_deterministic_algorithms(True), or keep its result",
    Kind.SIDE_EFFECT: "a replay does it again, or sees another value: only `if not lowtide.is_replaying()`, or pass it as an argument",
    Kind.REPLAY: "the replay does not make what the forward had: gradients may be wrong; `lowtide verify` says by how much",
}


def observation(kind: Kind, what: str, how: str = "") -> Observation:
    """Something that was seen, with what is to be said of it."""
    handled = kind in _HANDLED and not (kind is Kind.DEVICE and what.endswith("no guard"))
    return Observation(kind, what, handled, how or (_HANDLED if handled else _RISKS)[kind])
