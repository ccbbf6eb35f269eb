"""Values outside of a region that a replay puts in place for a while: afterwards everything is as it was, methods of classes too."""

from __future__ import annotations

import pytest

from lowtide.engine._guards._outside import Place, put_back_outside, put_outside


class Math:
    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return cls, x + 1

    def method(self, x):
        return self, x + 1


class Derived(Math):
    pass


def other(*args):
    return args


@pytest.mark.parametrize("owner", [Math, Derived])
@pytest.mark.parametrize("name", ["static", "of_class", "method"])
def test_methods_are_put_in_and_back_as_what_they_are(owner, name):
    original = Math.__dict__[name]
    called = Math() if name == "method" else Math
    undo = put_outside([(Place(owner, name, ""), other, None)])
    try:
        assert getattr(called, name)(1) == ((1,) if name == "static" else (called, 1))
        assert getattr(Math(), name)(1)[-1] == 1
    finally:
        put_back_outside(undo)
    assert Math.__dict__[name] is original
    assert name not in vars(Derived)
