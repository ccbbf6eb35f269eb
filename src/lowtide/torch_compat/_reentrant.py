"""The contract of PyTorch's reentrant form: what a call returns comes from one backward node, which gives all gradients or none.

The replay itself is that of the other form. The node behind it takes no part in the gradients: it stands where
``CheckpointFunction``'s node stands in PyTorch, and refuses what that one refuses: a backward for some inputs only, a backward that
no output needs, and a second one through a graph that was not retained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import _torch_private
from lowtide.torch_compat._region import Call, run


def run_reentrant(function: Callable[..., Any], args: tuple[Any, ...], preserve_rng_state: bool) -> Any:
    """Run a region in the reentrant form.

    Args:
        function: what to run now, and again in backward.
        args: for it.
        preserve_rng_state: a replay draws what the forward drew.

    Returns:
        What ``function`` returns.
    """
    result = run(function, args, {}, Call(preserve_rng_state, give_once=False))
    if not (torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)):
        return result
    inputs = {id(a) for a in args}
    if isinstance(result, torch.Tensor):
        return _through_node((result,), inputs)[0]
    return _through_node(result, inputs) if type(result) is tuple else result


def _through_node(outputs: tuple[Any, ...], inputs: set[int]) -> tuple[Any, ...]:
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    if not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return outputs
    anchor = torch.empty(0, device=tensors[0].device, requires_grad=True)
    passed = iter(_Outputs.apply([id(t) in inputs for t in tensors], anchor, *tensors))  # type: ignore[no-untyped-call]
    return tuple(next(passed) if isinstance(o, torch.Tensor) else o for o in outputs)


class _Outputs(torch.autograd.Function):
    """Passes tensors on, and their gradients back. An input of the region that it returned stays a view of itself, as in PyTorch."""

    @staticmethod
    def forward(ctx: Any, given: list[bool], anchor: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor)
        ctx.wanted = [o.requires_grad for o in outputs]
        passed = tuple(o if as_it_is else o.detach() for o, as_it_is in zip(outputs, given, strict=True))
        ctx.mark_non_differentiable(*(o for o in passed if not (o.is_floating_point() or o.is_complex())))
        return passed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if not _torch_private.backward_takes_all_gradients():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() and with an `inputs` parameter of "
                ".backward(): set use_reentrant=False, or call .backward() without `inputs`"
            )
        _anchor = ctx.saved_tensors  # refuses a second backward through a graph that was freed
        if not any(ctx.wanted):
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        return None, None, *(grad if wanted else None for wanted, grad in zip(ctx.wanted, grads, strict=True))
