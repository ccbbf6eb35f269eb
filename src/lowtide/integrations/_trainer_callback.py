"""The callback for ``transformers.Trainer``. This module is imported only where transformers is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from lowtide.integrations.transformers import enable
from lowtide.plan import Plan
from lowtide.policy import Handle, Policy
from lowtide.records import CallSite, Decision


class PolicyCallback(TrainerCallback):  # type: ignore[misc]
    """Installs a policy when training begins and removes it when it ends.

    Attributes:
        handle: of what is installed; ``None`` while nothing is.
    """

    def __init__(self, policy: Policy | Plan | str | Callable[[CallSite], Decision]) -> None:
        """Keep the policy for later."""
        self.policy = policy
        self.handle: Handle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install it. What a training that ended in an error left behind is removed first."""
        self._remove()
        self.handle = enable(kwargs["model"], self.policy)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove it."""
        self._remove()

    def _remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
