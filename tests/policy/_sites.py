"""Call sites made by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowtide.records import CallSite, Decision

aten = torch.ops.aten


def site(function: Any = torch.relu, *ops: Any, **fields: Any) -> CallSite:
    return CallSite(**{"function": function, "level": "function", "ops": ops, "region": "blocks.0", **fields})


def calls(module: nn.Module, path: str, *around: type) -> CallSite:
    return CallSite(module, "module", module=path, module_types=(*around, type(module)), region="blocks.0")


def decisions(policy: Any, sites: list[CallSite]) -> list[str]:
    """What a policy says of the calls of one region, ``k`` or ``r``."""
    from lowtide.policy._ledger import Decider

    decider = Decider(policy)
    numbered = [CallSite(**{**vars(one), "position": place}) for place, one in enumerate(sites)]
    return ["k" if decider.decide(one) is Decision.KEEP else "r" for one in numbered]
