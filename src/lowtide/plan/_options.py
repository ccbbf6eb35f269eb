"""What can be kept inside a region: its options from nothing to all that is dear, as a Pareto set.

To keep the result of a call costs its bytes until the replay and saves its time in it. Both add up over the calls of a region, so
the sets on the convex hull are the first few calls in order of seconds a byte (Dantzig 1957, "Discrete-variable extremum
problems", on the fractional knapsack); all sets of the dearest calls are tried as well, for what lies between. What each set
really does to the step is then read from the trace like any other region: what is alive anyway is free, and a replay that
needs no more than the first half of a region does not run the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from lowtide.plan._index import TraceIndex, ints
from lowtide.plan._keepable import Keepable, keepable_calls
from lowtide.plan._replay import Replay
from lowtide.plan._solution import KeptCall

_LEAST_SHARE = 0.01
"""Of the replay's time, what a call takes that is worth a thought."""
_MOST_CALLS = 24
"""Regions with more of them are segments of many blocks: to keep something in each is an option of the blocks themselves."""
_DEAREST = 5


@dataclass(frozen=True)
class _Offer:
    """A call, and what keeping it costs and saves."""

    call: KeptCall
    seconds: float
    bytes: int

    @property
    def rate(self) -> float:
        return self.seconds / max(self.bytes, 1)


def kept_sets(index: TraceIndex, replays: Sequence[Replay]) -> list[tuple[KeptCall, ...]]:
    """Sets of calls worth keeping in a region, the empty one left out.

    Args:
        index: of the trace.
        replays: of the region when it keeps nothing.
    """
    offers = _offers(index, replays)
    if not offers or len(offers) > _MOST_CALLS:
        return []
    by_rate = sorted(offers, key=lambda o: -o.rate)
    dearest = sorted(offers, key=lambda o: -o.seconds)[:_DEAREST]
    sets = [by_rate[: n + 1] for n in range(len(by_rate))]
    sets += [list(chosen) for n in range(1, len(dearest) + 1) for chosen in combinations(dearest, n)]
    return list(dict.fromkeys(tuple(sorted(o.call for o in chosen)) for chosen in sets))


def _offers(index: TraceIndex, replays: Sequence[Replay]) -> list[_Offer]:
    """Calls that are there in every occurrence of the region, with what they cost and save in all of them."""
    found: dict[KeptCall, list[tuple[float, int]]] = {}
    for replay in replays:
        for keepable in keepable_calls(index, replay.calls):
            found.setdefault(keepable.call, []).append(_price(index, replay, keepable))
    common = {call: prices for call, prices in found.items() if len(prices) == len(replays)}
    offers = [_Offer(call, sum(s for s, _ in prices), sum(b for _, b in prices)) for call, prices in common.items()]
    least = _LEAST_SHARE * sum(replay.seconds for replay in replays)
    return [offer for offer in offers if offer.seconds > least]


def _price(index: TraceIndex, replay: Replay, keepable: Keepable) -> tuple[float, int]:
    """Seconds that a replay takes for a call, and bytes that keeping it would hold."""
    ran = replay.ops[(replay.ops >= keepable.start) & (replay.ops < keepable.end)]
    dropped = index.slot_storage[replay.dropped]
    inside = dropped[(index.born[dropped] >= keepable.start) & (index.born[dropped] < keepable.end)]
    storages = ints({*keepable.outputs, *inside.tolist()})
    return float(index.seconds[ran].sum()), int(index.bytes[storages].sum())


def undominated(options: Sequence[tuple[int, float, int]], most: int) -> Iterator[int]:
    """Which options of one region to keep when there are more than ``most``: no other frees as much in as little time at as low a peak.

    Args:
        options: of each the bytes that it frees, its seconds, and its peak while replaying.
        most: how many at most; those with the most bytes a second first.
    """
    places = range(len(options))
    kept = [i for i in places if not any(_beats(options[j], options[i], j < i) for j in places if j != i)]
    kept.sort(key=lambda i: -options[i][0] / max(options[i][1], 1e-12))
    yield from sorted(kept[:most])


def _beats(one: tuple[int, float, int], other: tuple[int, float, int], first: bool) -> bool:
    no_worse = one[0] >= other[0] and one[1] <= other[1] and one[2] <= other[2]
    return no_worse and (one != other or first)
