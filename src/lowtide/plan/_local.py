"""How high memory gets while regions are replayed and go backward, when nothing else is replayed.

So regions that go into one region around them can be compared without a plan around that; what a plan comes to is up to the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.plan._index import NEVER, Ints, TraceIndex
from lowtide.plan._replay import Replay


class Levels:
    """Bytes alive by nature in one step, with what replays add to them.

    Args:
        index: of the trace.
    """

    def __init__(self, index: TraceIndex) -> None:
        self._index = index
        self._during = _natural(index, index.born) + index.workspace
        self._between = _natural(index, np.where(index.resident, index.born, index.born + 1))

    def of(self, replays: Sequence[Replay]) -> int:
        """The most bytes alive in these replays, in the order in which they run, and in backward as long as it wants what they made."""
        ran = [replay for replay in replays if replay.before != NEVER]
        if not ran:
            return 0
        return max(self._in_step(ran), self._in_replays(ran))

    def by_nature(self, begin: int, end: int) -> int:
        """The most bytes alive by nature during the ops ``begin <= i < end``."""
        return int(self._during[begin:end].max(initial=0))

    def _in_step(self, ran: Sequence[Replay]) -> int:
        begin = min(replay.before for replay in ran)
        end = max(begin + 1, *(int(replay.kept_until.max(initial=0)) for replay in ran))
        change = np.zeros(end - begin + 1, dtype=np.int64)
        for replay in ran:
            stays = replay.kept_until > replay.before
            size = self._index.bytes[replay.born[stays]]
            change[replay.before - begin] += size.sum()
            np.subtract.at(change, replay.kept_until[stays] - begin, size)
        there = change.cumsum()[:-1]
        during = self._during[begin:end]
        return int((during + there[: len(during)]).max(initial=0))

    def _in_replays(self, ran: Sequence[Replay]) -> int:
        """During each of the replays, with what is left of those before it."""
        made = np.cumsum([0, *(len(replay.born) for replay in ran)]).tolist()
        size = self._index.bytes[np.concatenate([replay.born for replay in ran])]
        until = np.concatenate([replay.kept_until for replay in ran])
        left = (int(size[:before][until[:before] > replay.before].sum()) for replay, before in zip(ran, made[:-1], strict=True))
        return max(int(self._between[r.before]) + there + r.peak_bytes for r, there in zip(ran, left, strict=True))


def _natural(index: TraceIndex, begin: Ints) -> Ints:
    change = np.zeros(index.op_count + 2, dtype=np.int64)
    np.add.at(change, begin, index.bytes)
    np.subtract.at(change, np.maximum(index.freed, begin), index.bytes)
    return change.cumsum()[: index.op_count].astype(np.int64)
