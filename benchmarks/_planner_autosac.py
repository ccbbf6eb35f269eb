"""PyTorch's AutoSAC, carried out: the program over modules of ``torch.distributed._tools``, and its choice of ops to keep in each.

PyTorch has the estimators and the two programs, but nothing that applies what they say. Its estimators run under fake tensors and time
ops on a GPU; here they see the real step, and time its ops by the processor's clock. What a module discards is given
back to the second program as the share of its memory that it may keep, and that choice of ops to selective checkpointing, by place.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Step = Callable[[], object]


class AutoSAC:
    """What AutoSAC knows of one model.

    Args:
        model: any.
        step: its step.

    Raises:
        ImportError: pulp or pwlf is missing.
    """

    def __init__(self, model: nn.Module, step: Step) -> None:
        from torch.distributed._tools import ilp_utils, mem_tracker, runtime_estimator, sac_estimator, sac_ilp

        logging.getLogger(sac_ilp.__name__).setLevel(logging.CRITICAL)
        self._model, self._ilp, self._skipped = model, sac_ilp, sac_estimator.OPS_TO_ALWAYS_SKIP
        memory, runtime, self._estimator = mem_tracker.MemTracker(), runtime_estimator.RuntimeEstimator(), sac_estimator.SACEstimator()
        with _on_real_tensors(runtime_estimator, sac_estimator), contextlib.redirect_stdout(io.StringIO()):
            memory.track_external(model)
            with memory:
                step()
                memory.reset_mod_stats()
                step()
            with runtime(estimate_mode_type="operator-level-cost-model"):
                step()
            with self._estimator(estimate_mode_type="operator-level-cost-model"):
                step()
            info = ilp_utils.aggregate_stats(model, memory, runtime, self._estimator, torch.device("cpu"))
        # A module that is called twice is in the order twice, which the programs cannot read.
        info["mod_order"] = {way: list(dict.fromkeys(names)) for way, names in info["mod_order"].items()}
        self._info, self._parse = info, ilp_utils.parse_module_info
        self.plain_bytes = ilp_utils.get_peak_memory_runtime_baseline(self._parse(info))[0]
        self._root = type(model).__name__

    def choice(self, budget_bytes: float) -> dict[str, list[int]]:
        """For each module to be checkpointed, which of its ops are kept; empty if the program has no solution."""
        chosen, _, _ = self._ilp.sac_milp(self._parse(self._info), budget_bytes / 2**30)
        stats = self._estimator.sac_mod_stats
        policy = self._ilp.get_optimal_checkpointing_policy_per_module
        return {name: policy(stats[name], 1 - discarded) for name, discarded in chosen.items()}

    @contextmanager
    def active(self, choice: dict[str, list[int]]) -> Iterator[None]:
        """The step runs by this choice in here."""
        with ExitStack() as stack:
            for name, kept in choice.items():
                module = self._model.get_submodule(name.removeprefix(self._root).removeprefix("."))
                stack.enter_context(by_torch([module], context_fn=partial(_contexts, kept, self._skipped)))
            yield


def _contexts(kept: list[int], skipped: set[Any]) -> Any:
    places: dict[bool, int] = {}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in skipped:
            return CheckpointPolicy.PREFER_RECOMPUTE
        place = places.get(context.is_recompute, 0)
        places[context.is_recompute] = place + 1
        return CheckpointPolicy.MUST_SAVE if place < len(kept) and kept[place] else CheckpointPolicy.PREFER_RECOMPUTE

    # Its programs keep ops in place together with what they write to, so that the last value is the one that is wanted.
    return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)


@contextmanager
def by_torch(blocks: list[nn.Module], **options: object) -> Iterator[None]:
    """These modules run under PyTorch's non-reentrant checkpointing in here."""
    before = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.__dict__["forward"] = partial(checkpoint, type(block).forward.__get__(block), use_reentrant=False, **options)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            del block.__dict__["forward"]
            if forward is not None:  # a region is installed there
                block.__dict__["forward"] = forward


@contextmanager
def _on_real_tensors(*modules: Any) -> Iterator[None]:
    """The estimators ask for fake tensors, and estimate for a GPU."""
    from torch._subclasses import FakeTensorMode

    runtime = modules[0].RuntimeEstimator
    before = [(module, "active_fake_mode", module.active_fake_mode) for module in modules]
    before.append((runtime, "_roofline_estimate", runtime.__dict__["_roofline_estimate"]))
    for module in modules:
        module.active_fake_mode = FakeTensorMode
    runtime._roofline_estimate = staticmethod(_timed)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _timed(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    began = time.process_time()
    out = func(*args, **(kwargs or {}))
    return out, (time.process_time() - began) * 1e3
