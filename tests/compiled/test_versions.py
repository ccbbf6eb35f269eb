"""Ways to compile a step side by side, and which of those within a budget is left in force."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide import _torch_compiler as torch_compiler
from lowtide.compiled import _fit, _versions
from lowtide.compiled._candidates import Candidates
from lowtide.compiled._partitioner import _by_torch
from lowtide.compiled._timeline import Timelines
from lowtide.compiled._versions import Versions
from lowtide.measure import Times

from .test_candidates import LADDER, PLAIN


class Adding:
    """A backend that adds a number to what the graph returns."""

    def __init__(self, number: int) -> None:
        self.number, self.graphs = number, 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return lambda *args: [out + self.number for out in graph.forward(*args)]


def test_what_backends_make_is_kept_side_by_side():
    first, second, third = Adding(1), Adding(2), Adding(3)
    compiled, x = torch.compile(lambda x: x * 3, backend=first), torch.ones(2)

    def found(backend: Adding) -> float:
        with torch_compiler.compiled_by(lambda of: backend if of.compiler_fn is first else of):
            return float(compiled(x)[0])

    assert float(compiled(x)[0]) == 4
    assert [found(second), found(third), found(second), found(third), float(compiled(x)[0])] == [5, 6, 5, 6, 4]
    assert [each.graphs for each in (first, second, third)] == [1, 1, 1]


def test_what_is_compiled_by_somebody_else_is_left_alone():
    first, other = Adding(1), Adding(2)
    theirs = torch.compile(lambda x: x * 3, backend=other)
    seen: list[object] = []
    with torch_compiler.compiled_by(lambda of: seen.append(of.compiler_fn) or of):
        theirs(torch.ones(2))
    assert seen == [other]
    with torch_compiler.compiled_by(lambda of: Adding(5) if of.compiler_fn is first else of):
        assert float(theirs(torch.ones(2))[0]) == 5


class Fitting(_fit._Fitting):
    """One whose step is not compiled: all peaks are known."""

    def __init__(self, taken: dict[int, str], times: dict[str, float]) -> None:
        super().__init__(nn.Linear(2, 2), lambda: None, lowtide.compile_options("1GiB"), lambda _: None)
        self._found = found = Candidates(LADDER, [PLAIN])
        found.peaks = {k: rung.peak_bytes for k, rung in enumerate(found.rungs)}
        self._options.taken = {size: next(r.ways for r in found.rungs if r.ways[0].saved == (name,)) for size, name in taken.items()}
        self._versions = self
        self._times, self.timed = times, False

    def times(self, rungs):
        self.timed = True
        return {k: self._times[rung.ways[0].saved[0]] for k, rung in enumerate(rungs)}

    def ranked(self, allowed: int) -> list[str]:
        return [self._found.rungs[k].ways[0].saved[0] for k in self._ranked(allowed)]


def test_of_those_within_the_budget_the_one_that_was_timed_to_be_the_fastest_is_first():
    assert Fitting({}, {"b": 1.2, "c": 1.1, "d": 1.3}).ranked(60) == ["c", "b", "d"]


def test_a_smaller_budget_takes_what_a_larger_one_took_where_that_is_within():
    fitting = Fitting({90: "c"}, {"b": 1.0, "c": 1.1, "d": 1.2})
    assert fitting.ranked(60) == ["c"]
    assert not fitting.timed


def test_a_larger_budget_takes_nothing_of_less_peak_than_what_a_smaller_one_took():
    assert Fitting({55: "c"}, {"b": 1.1, "c": 1.2, "d": 1.0}).ranked(60) == ["b", "c"]


def test_one_candidate_is_not_timed():
    fitting = Fitting({}, {})
    assert fitting.ranked(30) == ["d"]
    assert not fitting.timed


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_pytorch_makes_of_a_graph_at_the_end_of_its_knob_never_draws_random_numbers_again(joint_of):
    joint = joint_of(Dropping())
    inputs = [node for node in joint.nodes if node.op == "placeholder" and not joint.is_gradient[joint.number[node]]]
    timeline = Timelines(joint, [0.0] * len(joint.nodes)).of(joint.number[node] for node in inputs)
    way = _by_torch(joint, inputs, timeline)
    random = {i for i, node in enumerate(joint.nodes) if not joint.replayable[i] and node.op == "call_function" and joint.is_forward[i]}
    assert random
    assert {joint.by_name[name] for name in way.saved} & random


@pytest.mark.parametrize(("step_s", "rounds"), [(0.001, [3, 9]), (1.0, [3, 7]), (60.0, [3, 3])])
def test_what_is_close_is_timed_again_for_as_many_rounds_as_there_is_time(monkeypatch, step_s, rounds):
    asked: list[int] = []
    slower = [1.0, 1.0, 1.01, 1.2]

    def in_turns(steps, count, device, clock):
        asked.append(count)
        return [Times((step_s * factor,) * count) for factor in slower[: len(steps)]]

    monkeypatch.setattr(_versions, "time_in_turns", in_turns)
    versions = Versions(lambda: None, lowtide.compile_options("1GiB"), (), torch.device("cpu"), PLAIN)
    assert list(versions.times(LADDER[:3])) == [0, 1]
    assert asked == rounds
