"""``lowtide.explain`` is a package of functions about traces that can itself be called: with a region, or with a trace.

Its functions need no torch; what it says of a region does, so the two are brought together here, above both.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from lowtide.explain import explain as explain_step
from lowtide.records import StepTrace


class CallableExplain(ModuleType):
    """The type of ``lowtide.explain``."""

    def __call__(self, subject: Any) -> Any:
        """Explain a trace of a step, or list the guards of a region.

        Args:
            subject: a ``StepTrace``; or a region: what ``checkpoint`` or ``install`` returned, or a module with a region installed.

        Returns:
            An ``Explanation`` of a trace; of a region its guards, a tuple of ``Guard``.

        Raises:
            InvalidInputError: it is neither.
        """
        if isinstance(subject, StepTrace):
            return explain_step(subject)
        from lowtide.engine import explain as explain_region

        return explain_region(subject)
