"""What guards a region carries, why, and what each costs a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lowtide.engine._guards._ambient import take_ambient
from lowtide.engine._guards._attributes import take_changed
from lowtide.engine._guards._modules import Watch, watch_of
from lowtide.engine._guards._random import NUMPY, PYTHON, take_random
from lowtide.engine._install import InstalledForward, RegionHandle
from lowtide.engine._options import Options
from lowtide.engine._profile import Profile, profile_of
from lowtide.engine._state import take_state
from lowtide.errors import InvalidInputError
from lowtide.records import CallSite

_TRIES = 50


@dataclass(frozen=True, slots=True)
class Guard:
    """One kind of state that is taken with every call of a region and restored for its replays.

    Attributes:
        name: what is guarded.
        why: why this region needs it.
        seconds: what taking it costs a call, measured just now.
    """

    name: str
    why: str
    seconds: float


def explain(region: Any) -> tuple[Guard, ...]:
    """List the guards of a region.

    What is learned is known after the first call with gradients; before it, only what every region carries is listed.

    Args:
        region: what ``checkpoint`` returned, a handle that ``install`` returned, or a module with a region installed.

    Returns:
        The guards, those that every region carries first.

    Raises:
        InvalidInputError: it is no region.

    >>> import torch
    >>> for guard in explain(torch.nn.Identity()):
    ...     print(guard.name)
    Traceback (most recent call last):
    lowtide.errors.InvalidInputError: explain needs a region: ... not Identity
    """
    module, profile = _parts_of(region)
    guards = [
        _timed("torch's random generators", "always taken: whether a call draws is only known when it has", take_random),
        _timed("context variables, modes, default dtype, autocast", "always read: it is cheap", lambda: take_ambient(False)),
    ]
    if profile.attention and profile.scripts:
        guards.append(_timed("attention backends", "it computes attention", lambda: take_ambient(True)))
    if profile.python_random:
        guards.append(_timed("Python's random generator", "its code names it, or drew from it", lambda: take_state(PYTHON)))
    if profile.numpy_random:
        guards.append(_timed("NumPy's random generator", "its code names it, or drew from it", lambda: take_state(NUMPY)))
    if profile.outside.places:
        labels = ", ".join(place.label for place in profile.outside.places)
        guards.append(_timed(f"values elsewhere: {labels}", "its code reads them", profile.outside.take))
    if profile.meets:
        guards.append(Guard("modules as they begin to run", "it reaches some in a way that cannot be told beforehand", 0.0))
    if profile.copied:
        places = ", ".join(map(str, sorted(profile.copied)))
        guards.append(Guard(f"copies of its tensor inputs {places}", "a call writes to them", 0.0))
    kept = [Guard(f"result of {_called(site)}", f"the policy keeps it: {site.output_bytes:,} bytes", 0.0) for site in kept_sites(region)]
    return (*guards, *(_of_module(watch_of(module), profile) if module is not None else ()), *kept)


def kept_sites(region: Any) -> tuple[CallSite, ...]:
    """The calls inside a region whose results are kept, as the policy was shown them.

    Known after the first call with gradients. Bytes are those of that call.

    Args:
        region: what ``checkpoint`` returned, a handle that ``install`` returned, or a module with a region installed.

    Returns:
        The sites, in the order in which they were met.

    Raises:
        InvalidInputError: it is no region.
    """
    found: list[CallSite] = []
    for module, profile, options in _members_of(region):
        tables = [profile.kept] if module is None else [watch_of(module).kept, profile.kept]
        kinds = [kind for table in tables for kind in table.get(id(options.policy), {}).values()]
        found += [site for learned in kinds for site in learned.sites() if site not in found]
    return tuple(found)


def _called(site: CallSite) -> str:
    return f"{site.function_name} (call {site.index}) in {site.module or site.region}"


def _of_module(watch: Watch, profile: Profile) -> list[Guard]:
    guards = [_timed(f"{len(watch.names)} parameters and buffers, training flags", "always: a replay needs them as they were", watch.take)]
    unread = frozenset() if profile.steady is None else watch.statistics.unread(profile.number, watch.training_now())
    copied = ", ".join(watch.names[index] for index in watch.written if index not in unread)
    if copied:
        guards.append(Guard(f"copies of {copied}", "a call writes to them", guards[0].seconds))
    if unread:
        names = ", ".join(watch.names[index] for index in sorted(unread))
        guards.append(Guard(f"copies of {names} for replays", "a call writes to them, and has no use for what they were", 0.0))
    if watch.changed:
        names = ", ".join(watch.path_of(own, name) for own, name in watch.changed)
        guards.append(_timed(f"attributes {names}", "a call changes them", lambda: take_changed(watch.changed, watch.overwritten)))
    if watch.states:
        kinds = ", ".join(type(value).__name__ for value in watch.states)
        held = f"generators held by the modules ({kinds})"
        guards.append(_timed(held, "a call draws from them", lambda: [*map(take_state, watch.states)]))
    return guards


def _members_of(region: Any) -> list[tuple[nn.Module | None, Profile, Options]]:
    members = region.modules() if isinstance(region, RegionHandle) else [region]
    return [(*_parts_of(member), _options_of(member)) for member in members]


def _options_of(region: Any) -> Options:
    installed = region.__dict__.get("forward") if isinstance(region, nn.Module) else None
    options: Options = (installed.segment.region if isinstance(installed, InstalledForward) else region.__lowtide_region__).options
    return options


def _parts_of(region: Any) -> tuple[nn.Module | None, Profile]:
    if isinstance(region, RegionHandle):
        region = region.modules()[0]
    if isinstance(region, nn.Module) and isinstance(region.__dict__.get("forward"), InstalledForward):
        return region, profile_of(region)
    wrapped = getattr(region, "__wrapped__", None)
    if wrapped is None or not hasattr(region, "__lowtide_region__"):
        kind = type(region).__name__
        raise InvalidInputError(f"explain needs a region: what checkpoint or install returned, or a module that has one; not {kind}")
    owner = wrapped if isinstance(wrapped, nn.Module) else getattr(wrapped, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None, profile_of(wrapped)


def _timed(name: str, why: str, take: Callable[[], object]) -> Guard:
    start = time.perf_counter()
    for _ in range(_TRIES):
        take()
    return Guard(name, why, (time.perf_counter() - start) / _TRIES)
