"""Keeping the results of chosen calls inside a region: what that costs beside PyTorch's selective contexts and torch_remat's regions.

Every side keeps the same of a transformer block: the results of its four linear layers and of attention; layer norms, GELU and
additions are computed again. All sides are measured in one run and take turns in every round, in an order that rotates.

1. Overhead: time beyond a plain step with a second run of just the calls that are not kept, per region. Peaks are those of one step.
2. A step of at least 200 ms: its time with everything kept by autograd, and with only the results above kept.

    python benchmarks/selective.py

torch_remat is measured when it is installed (``pip install --no-deps torch_remat==0.2.*``). What it annotates keeps its
arguments as well, so its peak is higher.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from engine_overhead import Block, Region, Step, Workload, build, peak_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import lowtide.engine
from lowtide.records import CallSite, Decision

_aten = torch.ops.aten
KEPT = (
    *(_aten.addmm.default, _aten.mm.default, _aten.bmm.default),
    *(_aten._scaled_dot_product_flash_attention_for_cpu.default, _aten._scaled_dot_product_flash_attention.default),
    *(_aten._scaled_dot_product_efficient_attention.default, _aten._scaled_dot_product_cudnn_attention.default),
)


class KeepMatmuls:
    """Keeps the results of matrix products and of attention."""

    def decide(self, site: CallSite) -> Decision:
        """Functions with such an op in them are kept."""
        kept = site.level == "function" and any(op in KEPT for op in site.ops)
        return Decision.KEEP if kept else Decision.RECOMPUTE


class Annotated(nn.Module):
    """A block with torch_remat's annotations around what is kept."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the block's own."""
        import torch_remat as remat

        def keep(fn: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
            kept = remat.region(functools.partial(fn, **kwargs), name, recompute=False)(*args)
            remat.recompute_needs_tensor(kept)
            return kept

        block = self.block
        batch, length, width = x.shape
        q, k, v = keep(block.qkv, "qkv", block.attention_norm(x)).view(batch, length, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = keep(F.scaled_dot_product_attention, "attention", q, k, v, is_causal=True)
        x = x + keep(block.project, "project", mixed.transpose(1, 2).reshape(batch, length, width))
        return x + keep(block.down, "down", F.gelu(keep(block.up, "up", block.mlp_norm(x))))


class Again:
    """The part of a block that is computed again, given the results that were kept: the least that a replay can do."""

    def __init__(self, block: Block, x: torch.Tensor) -> None:
        batch, length, width = x.shape
        self.block, self.kept = block, {}  # type: tuple[Block, dict[str, torch.Tensor]]
        for name, size in (("qkv", 3 * width), ("mixed", width), ("project", width), ("up", 4 * width)):
            self.kept[name] = torch.randn(batch, length, size, device=x.device).requires_grad_()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Layer norms, GELU, views and the first addition; nothing is saved after the GELU's result."""
        block, kept = self.block, self.kept
        batch, length, width = x.shape
        block.attention_norm(x)
        kept["qkv"].view(batch, length, 3, block.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        kept["mixed"].view(batch, length, block.heads, -1).transpose(1, 2).transpose(1, 2).reshape(batch, length, width)
        x = x + kept["project"]
        block.mlp_norm(x)
        return F.gelu(kept["up"])


def torch_selective(fn: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's contexts with a list of ops."""
    contexts = functools.partial(create_selective_checkpoint_contexts, list(KEPT))
    return lambda *args: torch_checkpoint(fn, *args, use_reentrant=False, context_fn=contexts)


def lowtide_region(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A region with the policy."""
    return lowtide.engine.checkpoint(fn, policy=_POLICY)


def remat_region(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch_remat's region around an annotated block."""
    import torch_remat

    annotated = Annotated(fn)  # type: ignore[arg-type]
    run: Callable[..., Any] = torch_remat.checkpoint()(annotated)
    return run


_POLICY = KeepMatmuls()


def sides() -> dict[str, Region]:
    """Every implementation that is installed."""
    found: dict[str, Region] = {"torch selective": torch_selective, "lowtide": lowtide_region}
    return found | ({"torch_remat": remat_region} if find_spec("torch_remat") is not None else {})


def reference(workload: Workload) -> Step:
    """A plain step, and what is computed again of every block."""
    plain = build(workload, lambda fn: fn)
    again = [Again(layer, workload.inputs) for layer in workload.layers if isinstance(layer, Block)]

    def step() -> torch.Tensor:
        x = workload.inputs.detach().requires_grad_()
        for part in again:
            part(x)
        return plain()

    return step


def times_s(steps: dict[str, Step], rounds: int, device: str) -> dict[str, list[float]]:
    """Times of every step, which take turns in every round."""
    for step in list(steps.values()) * 4:
        step()
    clock = time.process_time if device == "cpu" else time.perf_counter  # others may be at work on the processor
    names, seen = list(steps), {name: [] for name in steps}  # type: tuple[list[str], dict[str, list[float]]]
    for turn in range(rounds):
        gc.collect()
        gc.disable()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _settle(device)
            start = clock()
            steps[name]()
            _settle(device)
            seen[name].append(clock() - start)
        gc.enable()
    return seen


def _settle(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def beyond(seen: dict[str, list[float]], name: str, base: str) -> float:
    """Median over the rounds of the difference within a round."""
    return statistics.median(a - b for a, b in zip(seen[name], seen[base], strict=True))


def overhead(rounds: int, device: str) -> None:
    """Prints overhead and peaks of every side."""
    workload = Workload("gpt", [Block(64, 4).to(device) for _ in range(12)], torch.randn(2, 16, 64, device=device))
    steps = {name: build(workload, region) for name, region in sides().items()}
    seen = times_s({"reference": reference(workload)} | steps, rounds, device)
    spent = {name: beyond(seen, name, "reference") / workload.regions for name in steps}
    peaks = {name: peak_bytes(step, device) for name, step in steps.items()}
    print(f"\n12 blocks of width 64, plain step and what is computed again {statistics.median(seen['reference']) * 1e3:.2f} ms")
    print(f"  {'':18}{'overhead/region':>17}{'peak':>12}{'left after':>12}")
    for name, seconds in spent.items():
        print(f"  {name:18}{seconds * 1e6:>14.1f} µs{peaks[name][0]:>12,}{peaks[name][1]:>12,}")
    for other in steps.keys() - {"lowtide"}:
        ratio, bytes_ratio = spent["lowtide"] / spent[other], peaks["lowtide"][0] / peaks[other][0]
        print(f"  lowtide / {other:18} overhead {ratio:.2f}, peak {bytes_ratio:.2f}")


def large_step(rounds: int, device: str, width: int, blocks: int, length: int) -> None:
    """Prints what keeping products and attention costs a large step, and what it saves."""
    layers = [Block(width, 8).to(device) for _ in range(blocks)]
    workload = Workload("gpt", layers, torch.randn(2, length, width, device=device))
    steps = {"plain": build(workload, lambda fn: fn)} | {name: build(workload, region) for name, region in sides().items()}
    seen = times_s(steps, rounds, device)
    plain = statistics.median(seen["plain"])
    print(f"\n{blocks} blocks of width {width}, {2 * length} tokens: plain step {plain * 1e3:.0f} ms")
    print(f"  {'':18}{'beyond plain':>14}{'peak':>14}")
    for name, step in steps.items():
        print(f"  {name:18}{beyond(seen, name, 'plain') / plain:>13.1%} {peak_bytes(step, device)[0]:>13,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--large-rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {args.device}, medians of {args.rounds} and {args.large_rounds} rounds")
    overhead(args.rounds, args.device)
    large_step(args.large_rounds, args.device, args.width, args.blocks, args.length)


if __name__ == "__main__":
    main()
