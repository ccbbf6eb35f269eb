"""Where in a run functions have to be looked at, which costs about a microsecond for each that is called.

A run passes a mark where a module is entered or left whose result is kept, or in which a linear layer is: what stands in for those is told
of it at no further cost. Watched runs show between which marks functions are called that are ever kept; only there they are looked at.
A replay passes the same marks as its forward, so that both count the same calls. A run that is not like any that was watched may call such
a function where none is looked for: the numbers of calls differ then, and from the next run on functions are looked at all along.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

Trail = tuple[Any, ...]
"""What a run called: each function, and the ``id`` of each module, with ``~id`` where it was left."""


def looks_of(trails: list[Trail], functions: Collection[Any], marks: Collection[int], linears: Collection[int]) -> frozenset[int]:
    """After how many marks one of these functions is called, but for linear layers: those are found without being looked for."""
    found: set[int] = set()
    for trail in trails:
        inside = None
        for place, called in _places(trail, marks):
            if type(called) is not int:
                if inside is None and called in functions:
                    found.add(place)
            elif inside is None and called in linears:
                inside = ~called
            elif called == inside:
                inside = None
    return frozenset(found)


def met_while_looking(trails: list[Trail], looks: Collection[int], marks: Collection[int]) -> set[int]:
    """Modules that are entered where functions are looked at."""
    return {called for trail in trails for place, called in _places(trail, marks) if type(called) is int and place in looks}


def _places(trail: Trail, marks: Collection[int]) -> Iterator[tuple[int, Any]]:
    """What was called, with how many marks were passed by then."""
    place = 0
    for called in trail:
        yield place, called
        if type(called) is int and (called in marks or ~called in marks):
            place += 1
