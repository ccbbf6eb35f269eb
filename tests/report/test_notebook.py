"""What a notebook shows of a fit and of a trace, and how it comes to know of it."""

from __future__ import annotations

import re
import sys
from html import unescape
from types import SimpleNamespace

import pytest

from lowtide import FitResult, notebook
from lowtide.records import StepTrace


class Formatter:
    def __init__(self):
        self.known = {}

    def for_type(self, kind, function):
        self.known[kind] = function


@pytest.fixture
def shell(monkeypatch):
    html = Formatter()
    found = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": html}), html=html)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: found))
    return found


def test_a_running_notebook_is_told_of_fits_and_traces(shell):
    assert notebook.enable()
    assert shell.html.known == {FitResult: notebook.fit_html, StepTrace: notebook.trace_html}


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not notebook.enable()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not notebook.enable()


@pytest.mark.parametrize("kind", ["fit", "trace"])
def test_figures_are_shown_and_the_report_is_folded_into_a_frame(make_fit, kind):
    fit = make_fit(blocks=4)
    shown = notebook.fit_html(fit) if kind == "fit" else notebook.trace_html(fit.trace)
    outside, frame = re.sub(r"<iframe.*", "", shown, flags=re.DOTALL), re.search(r'srcdoc="([^"]*)"', shown)[1]
    assert "peak" in outside.lower()
    assert "<details>" in outside
    page = unescape(frame)
    assert page.startswith("<!DOCTYPE html>")
    assert 'id="timeline"' in page
