"""transformers: a policy for a model, by hand or while its ``Trainer`` trains.

    handle = lowtide.integrations.transformers.enable(model, "selective")

    trainer = Trainer(model, arguments, callbacks=[lowtide.integrations.transformers.trainer_callback("selective")])

What ``gradient_checkpointing_enable`` switches on runs by lowtide's engine inside ``lowtide.torch_compat.substituted()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from lowtide.errors import AlreadyAppliedError, InvalidInputError
from lowtide.integrations._extra import require
from lowtide.plan import Plan
from lowtide.policy import Handle, Policy, apply
from lowtide.records import CallSite, Decision

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["enable", "trainer_callback"]


def enable(model: nn.Module, policy: Policy | Plan | str | Callable[[CallSite], Decision] = "full") -> Handle:
    """Install a policy on a transformers model, in place of ``model.gradient_checkpointing_enable()``.

    It is ``lowtide.apply`` for models that have a checkpointing of their own: the two together would replay every layer twice. As there,
    the model makes no key-value cache while gradients are recorded. A PEFT model is as good as the model in it.

    Args:
        model: a transformers model, or a module with one in it.
        policy: what ``lowtide.apply`` takes.

    Returns:
        A handle; ``handle.remove()`` puts everything back.

    Raises:
        MissingExtraError: transformers is not installed.
        InvalidInputError: there is no transformers model in the module; or what ``lowtide.apply`` raises.
        AlreadyAppliedError: the model's own checkpointing is on, or a policy is installed already.
    """
    kind = require("transformers", "transformers").PreTrainedModel
    if not any(isinstance(module, kind) for module in model.modules()):
        raise InvalidInputError(f"enable needs a transformers model, not {type(model).__name__}: use lowtide.apply for any other module")
    own = next((path for path, module in model.named_modules() if getattr(module, "gradient_checkpointing", False) is True), None)
    if own is not None:
        raise AlreadyAppliedError(
            f"the checkpointing of transformers is on in {own or type(model).__name__!r}, and would replay what this replays once more: "
            "call model.gradient_checkpointing_disable() first, or leave it on and use lowtide.torch_compat.substituted()"
        )
    return apply(model, policy)


def trainer_callback(policy: Policy | Plan | str | Callable[[CallSite], Decision] = "full") -> TrainerCallback:
    """Make a callback with which a ``transformers.Trainer`` trains under a policy.

    The policy is installed when training begins and removed when it ends. Leave ``gradient_checkpointing`` of the training arguments off.

    Args:
        policy: what ``lowtide.apply`` takes.

    Returns:
        For the ``callbacks`` of a ``Trainer``. Its attribute ``handle`` is that of ``enable`` while training goes on.

    Raises:
        MissingExtraError: transformers is not installed.
    """
    require("transformers", "transformers")
    from lowtide.integrations._trainer_callback import PolicyCallback

    return PolicyCallback(policy)
