"""What else is done to a model, and in which order: wrappers that shard it, and checkpointing of its own.

``fully_shard`` changes modules in place, as ``apply`` does, and its hooks run around ``forward``: either may come first. A wrapper
(``FullyShardedDataParallel``) gathers parameters in its own forward, so it has to come last, around the regions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from lowtide.errors import PolicyError

_INSIDE = "_fsdp_wrapped_module"
_FLAGS = ("gradient_checkpointing", "use_checkpoint", "_checkpoint_wrapped_module")


def own_class(module: nn.Module) -> type:
    """The user's class: ``fully_shard`` puts one of its own in its place, made of ``FSDPModule`` and the user's."""
    kind, *bases = type(module).__mro__
    return bases[1] if bases[0].__name__ == "FSDPModule" else kind


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse what was wrapped before regions were installed.

    Raises:
        PolicyError: a module is wrapped by ``FullyShardedDataParallel``.
    """
    for path, module in model.named_modules():
        if _INSIDE in module._modules:
            raise PolicyError(
                f"{path or 'the model'!r} is wrapped by FullyShardedDataParallel already, so regions would gather its parameters again: "
                "apply first and wrap then (with fully_shard the order does not matter)"
            )


def warn_of_checkpointing(members: Iterable[tuple[str, nn.Module]]) -> None:
    """Warn where a module checkpoints itself already: its inside would be computed a third time."""
    for path, module in members:
        for inner_path, inner in module.named_modules():
            if any(vars(inner).get(flag) is True or flag in inner._modules for flag in _FLAGS):
                where = ".".join(filter(None, (path, inner_path)))
                warnings.warn(
                    f"{where!r} checkpoints itself already, so it would be replayed inside a replay: switch that off", stacklevel=4
                )
                return
