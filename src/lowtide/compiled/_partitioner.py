"""The partitioner that inductor calls with each joint graph of forward and backward, and the rule that it follows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

from lowtide.compiled import _torch_partitioner as torch_partitioner
from lowtide.compiled._costs import Costs
from lowtide.compiled._joint import Joint
from lowtide.compiled._menu import Search, Way
from lowtide.compiled._stretches import Stretches
from lowtide.compiled._timeline import Timeline, Timelines
from lowtide.errors import InfeasibleBudgetError, LowtideError

_SHARES = (1, 0.999, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0)
"""Settings of PyTorch's own knob: all that it would save, a little less, for which it replays whatever is cheap, and so on."""
_SOURCES = tuple(str(file) for file in sorted(Path(__file__).parent.glob("*.py")))
_menus: dict[str, Menu] = {}
_calls = itertools.count()


@dataclass(frozen=True)
class Menu:
    """What can become of one graph.

    Attributes:
        by_torch: what PyTorch makes of it, without a budget and at settings of its knob down to 0.
        ways: those that are worth a choice, from the fastest on.
    """

    by_torch: tuple[Way, ...]
    ways: tuple[Way, ...]

    @property
    def plain(self) -> Way:
        """What PyTorch makes of it without a budget."""
        return self.by_torch[0]

    @property
    def leanest(self) -> Way:
        """The one of least peak."""
        return min(self.ways, key=lambda way: way.peak_bytes)

    def within(self, allowed_bytes: int) -> Way | None:
        """The fastest with no more than some bytes alive."""
        return next((way for way in self.ways if way.peak_bytes <= allowed_bytes), None)


@dataclass(frozen=True)
class Rule:
    """What a partitioner is to do. Where nothing is said of a graph, PyTorch's own split is taken.

    Attributes:
        ways: names of what is saved, by the signature of the graph.
        allowed_bytes: for other graphs, the most that may be alive beyond what was there before; the leanest way where none is within that.
        must_fit: it is an error where none is within that.
        lean: take the leanest of any other graph.
        tag: tells rules apart that are else the same: what is compiled under one is not shared with the other.
    """

    ways: tuple[tuple[str, tuple[str, ...]], ...] = ()
    allowed_bytes: int | None = None
    must_fit: bool = False
    lean: bool = False
    tag: int | None = None


@dataclass
class Seen:
    """A graph that was split."""

    order: int
    menu: Menu = field(repr=False)


class Partitioner(CustomPartitionerFn):
    """Splits joint graphs by a rule.

    Two are equal that follow the same rule, so that modules which are compiled under both share what is compiled.

    Attributes:
        rule: what it follows; asked for once, when it is first needed.
        seen: the graphs that it was given, by signature.
    """

    def __init__(self, first_rule: Callable[[], Rule]) -> None:
        """Have no rule yet."""
        self._first_rule = first_rule
        self._rule: Rule | None = None
        self.seen: dict[str, Seen] = {}

    def forget(self) -> None:
        """Have no rule again."""
        self._rule = None

    @property
    def rule(self) -> Rule:
        """What it follows."""
        if self._rule is None:
            self._rule = self._first_rule()
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self._rule = rule

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a graph.

        Raises:
            InfeasibleBudgetError: the rule has a budget, and no way is within it.
        """
        with torch_partitioner.choosing(partial(self._choose, kwargs["num_fwd_outputs"])):
            return torch_partitioner.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        """What the compiler's caches know it by: this code and the rule."""
        # Inductor's own cache knows the graphs that come of it. Only where whole splits are kept, the rule is what tells them apart.
        return get_hash_for_files(_SOURCES, repr(replace(self.rule, tag=None)) if functorch_config.enable_autograd_cache else "")

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Partitioner):
            return self is other
        try:
            return self.rule == other.rule
        except LowtideError:  # one has no rule: whoever compiles under it hears of that, where the compiler asks here nobody would
            return False

    __hash__ = object.__hash__

    def __deepcopy__(self, _: Any) -> Partitioner:
        """The compiler copies its settings."""
        return self

    def __reduce__(self) -> Any:
        """The compiler's caches pickle its settings for their keys."""
        return bytes, (self.uuid(),)

    def _choose(self, forward_count: int, graph: fx.Graph, info: Any, own: torch_partitioner.Own) -> list[fx.Node]:
        costs = Costs()
        joint = Joint(graph, info, forward_count, costs.replay_s)
        if joint.signature not in _menus:
            found = _menu(joint, costs, own)
            if found is None:
                return own(1)
            _menus[joint.signature] = found
        menu = _menus[joint.signature]
        self.seen[joint.signature] = Seen(next(_calls), menu)
        saved = self._decided(joint.signature, menu)
        return own(1) if saved is None else [joint.nodes[joint.by_name[name]] for name in saved]

    def _decided(self, signature: str, menu: Menu) -> tuple[str, ...] | None:
        rule = self.rule
        told = dict(rule.ways).get(signature)
        if told is not None:
            return told
        if rule.lean:
            return menu.leanest.saved
        if rule.allowed_bytes is None:
            return None
        way = menu.within(rule.allowed_bytes)
        if way is None and rule.must_fit:
            raise _infeasible(rule.allowed_bytes, menu.leanest.peak_bytes)
        return (way or menu.leanest).saved


def _menu(joint: Joint, costs: Costs, own: torch_partitioner.Own) -> Menu | None:
    """The ways of a graph; ``None`` where there is nothing to choose."""
    save_s = [costs.save_s(node) for node in joint.nodes]
    timelines, by_torch = Timelines(joint, save_s), [own(share) for share in _SHARES]
    theirs = [(saved, timelines.of(joint.number[node] for node in saved)) for saved in by_torch]
    found = Search(timelines, Stretches(joint, save_s), dict.fromkeys(timeline.saved for _, timeline in theirs)).timelines()
    if not found:
        return None
    plain = _way(theirs[0][1], [node.name for node in theirs[0][0]])
    by_them = {timeline.saved: _by_torch(joint, saved, timeline) for saved, timeline in reversed(theirs) if timeline.possible}
    by_them[theirs[0][1].saved] = plain
    ours = [by_them.get(t.saved) or _way(t, _names(joint, t)) for t in found]
    return Menu(tuple(by_them.get(timeline.saved, plain) for _, timeline in theirs), tuple(ours))


def _by_torch(joint: Joint, saved: Sequence[fx.Node], timeline: Timeline) -> Way:
    """As PyTorch has it, unless that runs again what cannot run again: at the low end of its knob it draws other random numbers."""
    as_it_is = timeline.saved.issubset(joint.number[node] for node in saved)
    return _way(timeline, [node.name for node in saved] if as_it_is else _names(joint, timeline))


def _names(joint: Joint, timeline: Timeline) -> list[str]:
    return [joint.nodes[i].name for i in sorted(timeline.saved)]


def _way(timeline: Timeline, saved: list[str]) -> Way:
    forward, backward = int(timeline.forward.max(initial=0)), int(timeline.backward.max(initial=0))
    return Way(tuple(saved), timeline.saved_bytes, forward, backward, timeline.seconds)


def _infeasible(allowed_bytes: int, least_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"no way to split the compiled graph fits: beyond what is alive before it, {allowed_bytes} bytes are left of the budget, and the "
        f"leanest way needs {least_bytes} by its simulated timeline: allow at least {least_bytes - allowed_bytes} bytes more, or measure "
        "with lowtide.fit_compiled",
        budget_bytes=allowed_bytes,
        smallest_bytes=least_bytes,
    )
