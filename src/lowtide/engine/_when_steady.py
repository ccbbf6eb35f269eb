"""Which calls can go the short way, see ``_steady.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lowtide.engine._guards._modules import watch_of
from lowtide.engine._kept._keeping import course_of
from lowtide.engine._parts import Held, Made
from lowtide.engine._steady import Steady, is_settled
from lowtide.engine._thread import is_replaying
from lowtide.engine._tree import ATOMS

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._frame import Frame

_PLACES = frozenset({Held, Made})


def steady_of(frame: Frame, call: Call) -> Steady | None:
    """What calls like this one have in common, if this one needed nothing that such calls leave out."""
    options, profile, script = frame.region.options, call.profile, call.script
    if script is None or script.late or is_replaying() or frame.broken:
        return None
    if not script.plain and not frame.joinable:  # on its own it saves nothing: there is a shorter way yet
        return None
    if options.check_values or profile.unsteady or profile.meets or profile.transforms:
        return None
    course = None if options.policy is None else course_of(frame, call, options.policy)
    if course is None and options.policy is not None:
        return None
    if profile.outside.environment or profile.outside.stateful or (profile.outside.places and not options.python_state):
        return None
    if call.kwargs or call.states or call.attributes or call.news:
        return None
    if profile.copied or profile.python_random or profile.numpy_random:
        return None
    if not all(type(arg) in _PLACES or type(arg) in ATOMS for arg in call.args):
        return None
    modules: list[nn.Module] = []
    objects: list[object] = []
    profile.outside.take(modules.append, objects)
    return Steady(frame, call, script, modules, objects, course) if _are_all_known(call, modules) else None


def _are_all_known(call: Call, modules: list[nn.Module]) -> bool:
    """Whether what it calls and what it may run is all known.

    Args:
        call: one call.
        modules: those that are reached elsewhere.
    """
    if (call.objects or call.profile.watch is None) if call.fixed else not is_settled(call.target):
        return False
    watches = dict.fromkeys([call.profile.watch] if call.fixed else [])
    watches |= dict.fromkeys(map(watch_of, modules))
    if [watch for watch, _ in call.watches] != list(watches):
        return False
    return all(watch.take_again(taken[2]) is not None for watch, taken in call.watches)
