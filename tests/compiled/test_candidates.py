"""Which ways to compile a step are looked at for a budget, and in which order."""

from __future__ import annotations

from lowtide.compiled._candidates import Candidates
from lowtide.compiled._ladder import Rung
from lowtide.compiled._menu import Way


def rung(name: str, seconds: float, peak: int) -> Rung:
    return Rung.of([Way((name,), peak // 2, peak // 2, peak, seconds)])


PLAIN, KNOB, LEAST_KNOB = rung("plain", 1.0, 100), rung("knob", 2.5, 70), rung("least", 6.0, 45)
LADDER = [rung("a", 2.0, 80), rung("b", 3.0, 60), rung("c", 4.0, 50), rung("d", 5.0, 30)]


def measured(candidates: Candidates, allowed: int, peak_of: dict[str, int]) -> list[str]:
    """Names of what is compiled for a budget, in order."""
    names: list[str] = []
    candidates.peaks[candidates.plain] = peak_of.get("plain", 100)

    def compile_(k: int) -> None:
        names.append(candidates.rungs[k].ways[0].saved[0])
        candidates.peaks[k] = peak_of.get(names[-1], candidates.rungs[k].peak_bytes)

    while (k := candidates.next(allowed, len(names))) is not None:
        compile_(k)
    rivals: list[int] = []
    while candidates.within(allowed) and (k := candidates.next_rival(allowed, rivals)) is not None:
        rivals.append(k)
        compile_(k)
    return names


def candidates() -> Candidates:
    return Candidates(LADDER, [PLAIN, KNOB, KNOB, LEAST_KNOB])


def test_the_fastest_within_is_compiled_and_then_what_pytorch_makes_of_it_and_the_next():
    assert measured(candidates(), 82, {}) == ["a", "knob", "least", "b"]


def test_what_pytorch_makes_of_it_counts_even_where_it_is_predicted_to_be_worse():
    found = candidates()
    assert measured(found, 72, {}) == ["knob", "least", "b"]
    assert [found.rungs[k].ways[0].saved[0] for k in found.within(72)] == ["knob", "b", "least"]


def test_where_nothing_fits_as_predicted_the_leanest_and_pytorchs_own_are_tried():
    assert measured(candidates(), 20, {"least": 18}) == ["d", "least"]
    assert set(measured(candidates(), 10, {})) == {"d", "knob", "least"}


def test_what_is_no_gain_over_plain_is_left_out():
    slower_and_larger = rung("worse", 2.0, 120)
    assert slower_and_larger not in Candidates([slower_and_larger, *LADDER], [PLAIN]).rungs
