"""What the engine knows of a call that was watched, in words: what is taken with it, and put back for its replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowtide.engine._parts import Held
from lowtide.engine._tree import places_in

if TYPE_CHECKING:
    from lowtide.engine._call import Call


@dataclass(frozen=True, slots=True)
class Facts:
    """Attributes are names, as people are shown them.

    Attributes:
        random: sources that it draws from.
        buffers: buffers and parameters that it writes to.
        attributes: attributes of modules that it changes.
        inputs: arguments that it writes to.
        ambient: state around the call that is not the default.
    """

    random: tuple[str, ...]
    buffers: tuple[str, ...]
    attributes: tuple[str, ...]
    inputs: tuple[str, ...]
    ambient: tuple[str, ...]


def facts_of(call: Call) -> Facts:
    """What was learned of a call, and of those before it."""
    watches = [watch for watch, _ in call.watches]
    return Facts(
        random=tuple(_random(call)),
        buffers=tuple(watch.names[index] for watch in watches for index in watch.written),
        attributes=tuple(watch.path_of(own, name) for watch in watches for own, name in watch.changed),
        inputs=tuple(_inputs(call)),
        ambient=tuple(_ambient(call)),
    )


def _random(call: Call) -> Iterator[str]:
    profile = call.profile
    drawn = ((profile.torch_random, "torch"), (profile.python_random, "Python"), (profile.numpy_random, "NumPy"))
    yield from (f"the generator of {library}" for here, library in drawn if here)
    for watch, _ in call.watches:
        yield from (f"a {type(value).__name__} of its own" for value in watch.states)


def _inputs(call: Call) -> Iterator[str]:
    for number, stored in enumerate([*call.args, *call.kwargs.values()]):
        for _, place in places_in(stored, ""):
            if isinstance(place, Held) and place.place in call.profile.copied:
                yield next(iter(call.names_of(place)), f"argument {number}")


def _ambient(call: Call) -> Iterator[str]:
    dtype, functions, dispatches, autocast = call.ambient[1:5]
    if dtype is not torch.float32:
        yield f"default dtype {str(dtype).removeprefix('torch.')}"
    if autocast is not None:
        yield from (f"autocast on {kind} to {str(to).removeprefix('torch.')}" for kind, on, to in autocast[1:] if on)
    if functions or dispatches:
        yield f"{len(functions) + len(dispatches)} modes around it"
    if call.profile.attention and call.profile.scripts:
        yield "the choice of attention backends"
