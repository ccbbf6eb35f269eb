"""Which of some numbers are among others."""

from __future__ import annotations

import numpy as np

from lowtide.plan._marks import Marks


def test_the_same_are_found_as_by_numpy_whatever_was_asked_before():
    random, marks = np.random.default_rng(0), Marks(50)
    for _ in range(100):
        values, those = random.integers(0, 50, 20), random.integers(0, 50, random.integers(0, 30))
        assert (marks(values, those) == np.isin(values, those)).all()


def test_none_is_among_no_others():
    marks = Marks(3)
    assert marks(np.array([-1, 0, 2]), np.array([0, 1, 2])).tolist() == [False, True, True]
