"""The inner loops of the engine, compiled, where they could be: ``_native*.c``, which ``build_native.py`` compiles as lowtide is installed.

Each has a twin in Python that does the same: ``Packing``, ``Filling`` and ``forget`` in ``_packing.py``, ``unpack`` in ``_unpack.py``,
the fields of ``Slot`` in ``_slot.py``, ``Surroundings`` in ``_guards/_ambient.py``, ``are_unmodified`` in ``_guards/_unmodified.py``,
what ``Watch`` in ``_guards/_modules.py`` does without ``Settled``, what of ``_steady.py`` ends in ``_in_python``, with ``take_outside``,
``calls_the_same`` and ``finds_the_same``, what in ``_unpack.py`` comes after ``_replay_for``, the rest in ``_guards/_reading.py``. The
twins run where there was no compiler, and where LOWTIDE_NATIVE=0 says so.
"""

from __future__ import annotations

from lowtide._native_loading import load_native

native = load_native("lowtide.engine._native", 11)
