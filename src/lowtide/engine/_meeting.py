"""Watching, from when they begin to run, the modules of a call to which nothing that it was given had led."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lowtide.engine._guards._modules import watch_of
from lowtide.engine._tower import tower

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._learning import Before


class Meeting:
    """Is told of the modules that a call runs.

    Attributes:
        before: of a watched call, to note what they were.
    """

    def __init__(self, call: Call) -> None:
        self.before: Before | None = None
        self._call = call
        self._count = 0
        self._known: set[int] = set()
        self._led_to = frozenset(self._watched())
        self._ran: dict[int, nn.Module] = {}

    def __call__(self, module: nn.Module) -> None:
        """A module begins to run."""
        own = id(module.__dict__)
        if own in self._ran:
            return
        self._ran[own] = module
        if own not in self._watched():
            with tower.silence():
                self._watch(module)

    def _watched(self) -> set[int]:
        """``id`` of the dictionaries of all modules that are watched by now."""
        watches = self._call.watches
        while self._count < len(watches):
            self._known.update(map(id, watches[self._count][0].dictionaries()))
            self._count += 1
        return self._known

    def _watch(self, module: nn.Module) -> None:
        watch = watch_of(module)
        if watch.lazy:  # it gets its parameters only now: there is nothing to go back to
            return
        if self.before is None and not watch.has_gone_so():
            watch.expect_writes()
            self._call.profile.met_stranger()
        self._call.module(module)
        if self.before is not None:
            self.before.note_watches()

    def must_go_on(self) -> bool:
        """Whether modules ran to which no later call would be led either, by what it is given or what its code reads."""
        found: list[nn.Module] = []
        self._call.profile.outside.led_to(self._call.met, found.append)
        led_to = self._led_to.union(*(map(id, watch_of(module).dictionaries()) for module in found))
        return not led_to.issuperset(self._ran)
