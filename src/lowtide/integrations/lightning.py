"""Lightning: a policy while its ``Trainer`` fits.

trainer = Trainer(callbacks=[lowtide.integrations.lightning.callback("selective")])
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.integrations._extra import require
from lowtide.plan import Plan
from lowtide.policy import Handle, Policy, apply
from lowtide.records import CallSite, Decision

if TYPE_CHECKING:
    from lightning.pytorch import Callback

__all__ = ["callback"]


def callback(policy: Policy | Plan | str | Callable[[CallSite], Decision] = "full") -> Callback:
    """Make a callback with which a Lightning ``Trainer`` fits under a policy.

    The policy is installed on the ``LightningModule`` when fitting begins, after the strategy has wrapped it, and removed when fitting
    ends, also in an error.

    Args:
        policy: what ``lowtide.apply`` takes.

    Returns:
        For the ``callbacks`` of a ``Trainer``, of ``lightning`` as of ``pytorch_lightning``. Its attribute ``handle`` is that of
        ``lowtide.apply`` while fitting goes on.

    Raises:
        MissingExtraError: neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """
    older = sys.modules.get("pytorch_lightning") if "lightning.pytorch" not in sys.modules else None
    base = (older or require("lightning.pytorch", "lightning")).Callback
    made: Callback = type("PolicyCallback", (_PolicyCallback, base), {"__doc__": _PolicyCallback.__doc__})(policy)
    return made


class _PolicyCallback:
    """Installs a policy when fitting begins and removes it when it ends.

    Attributes:
        handle: of what is installed; ``None`` while nothing is.
    """

    def __init__(self, policy: Policy | Plan | str | Callable[[CallSite], Decision]) -> None:
        self.policy = policy
        self.handle: Handle | None = None

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Install it."""
        self.handle = apply(pl_module, self.policy)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Remove it."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Remove it."""
        self.on_fit_end(trainer, pl_module)
