"""The traced peak against an independent count of the same steps, and what a trace costs.

``counted`` is the most that the CPU allocator's events add up to in a step that nothing of lowtide's touches (with what was there
before it); ``fake`` is the peak of the trace under fake tensors for the CPU. On CUDA (``--device cuda``) the count is
``max_memory_allocated``. ``cost`` is the time of ``lowtide.trace``, both of its steps included, over the time of a step: on the CPU the
processor's, of steps and traces in turn. The exit status says whether every peak is exact enough.

    python benchmarks/trace_accuracy.py [--threads 1] [--device cpu] [STEP ...]

``llama`` needs ``transformers``, and is left out without it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import lowtide
from lowtide.measure import peak_bytes
from lowtide.trace import device_of
from lowtide.units import format_bytes, format_seconds
from lowtide.workloads import bundled

Step = Callable[[], object]
Made = tuple[nn.Module, Step]
ALLOWED = {"cpu": 0.005, "cuda": 0.02}


def of_workload(name: str, device: str) -> Made:
    workload = bundled(name, device=device)
    return workload.model, workload.step


def llama(device: str) -> Made:
    """A small llama of transformers, random weights, trained on random tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, max_position_embeddings=256, use_cache=False, **sizes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(1000, (8, 128), device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return model, step


class Experts(nn.Module):
    """A layer of which each token takes two of eight perceptrons, by a learned router."""

    def __init__(self, width: int, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        mlps = (nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts))
        self.experts = nn.ModuleList(mlps)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(chosen == index)
            out = out.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return x + out


def moe(device: str) -> Made:
    """Four mixture-of-experts layers on 2,048 tokens."""
    model, x = nn.Sequential(*(Experts(64) for _ in range(4))).to(device), torch.randn(2048, 64, device=device)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return model, step


def classifier() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 256), nn.LayerNorm(256)) for _ in range(6)]
    return nn.Sequential(*layers)


def autocast(device: str) -> Made:
    """Six wide layers under bfloat16."""
    model, x = classifier().to(device), torch.randn(1024, 256, device=device)

    def step() -> None:
        model.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            out = model(x)
        F.mse_loss(out.float(), x).backward()

    return model, step


def accumulation(device: str) -> Made:
    """Gradients of four batches added up, then AdamW."""
    model, x = classifier().to(device), torch.randn(4, 512, 256, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        for part in x:
            (F.mse_loss(model(part), part) / len(x)).backward()
        optimizer.step()

    return model, step


class Waves(nn.Module):
    """Ops on sixteen numbers each: nearly all of their time is that of calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = (x * self.scale).sin() + x
        return x


def tiny(device: str) -> Made:
    """A thousand tiny ops forward: what a trace takes for each op is most of its cost here."""
    model, x = nn.Sequential(*(Waves() for _ in range(40))).to(device), torch.randn(4, 4, device=device)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return model, step


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def regions(device: str) -> Made:
    """Three thousand blocks, each of which could be a region."""
    model, x = nn.Sequential(*(Block(64) for _ in range(3000))).to(device), torch.randn(64, 64, device=device)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return model, step


STEPS: dict[str, Callable[[str], Made]] = {
    "gpt": lambda device: of_workload("gpt", device),
    "resnet": lambda device: of_workload("resnet", device),
    "unet": lambda device: of_workload("unet", device),
    "llama": llama,
    "moe": moe,
    "autocast": autocast,
    "accumulation": accumulation,
    "regions": regions,
    "tiny": tiny,
}


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def step_and_trace_seconds(model: nn.Module, step: Step, times: int = 5) -> tuple[float, float]:
    """Medians of both, taken in turn."""
    device = device_of(model)
    pairs = [(seconds_of(step, device), seconds_of(lambda: lowtide.trace(model, step), device)) for _ in range(times)]
    steps, traces = zip(*pairs, strict=True)
    return statistics.median(steps), statistics.median(traces)


def fake_against(traced: lowtide.StepTrace, model: nn.Module, step: Step) -> tuple[str, bool]:
    """The peak under fake tensors over the real one, and whether it is exact enough."""
    try:
        fake = lowtide.trace(model, step, fake=True)
    except lowtide.StepError:
        return "asks for values", True
    ratio = lowtide.simulate(fake, None).peak_bytes / lowtide.simulate(traced, None).peak_bytes
    same_ops = [op.name for op in fake.ops] == [op.name for op in traced.ops]
    return f"{ratio:.4f}" + ("" if same_ops else ", other ops"), abs(ratio - 1) <= ALLOWED["cpu"]


def row(name: str, make: Callable[[str], Made], device: str) -> tuple[list[str], bool]:
    torch.manual_seed(0)
    model, step = make(device)
    step()
    step_s, trace_s = step_and_trace_seconds(model, step)
    traced = lowtide.trace(model, step)
    resident = sum(storage.bytes for storage in traced.storages if storage.resident)
    state = torch.get_rng_state()
    counted = peak_bytes(step, device_of(model), resident)
    torch.set_rng_state(state)
    peak = lowtide.simulate(traced, None).peak_bytes
    fake, fake_exact = fake_against(traced, model, step) if device == "cpu" else ("", True)
    exact = abs(peak / counted - 1) <= ALLOWED[device] and fake_exact
    cells = [name, str(len(traced.ops)), format_bytes(peak), format_bytes(counted), f"{peak / counted:.4f}"]
    cells += [fake, format_seconds(step_s), format_seconds(trace_s)]
    return [*cells, f"{trace_s / step_s:.1f}", "yes" if exact else "NO"], exact


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=[name for name in STEPS if name != "llama" or find_spec("transformers")])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=list(ALLOWED), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    columns = ("step", "ops", "traced", "counted", "traced/counted", "fake/traced", "step time", "trace time", "cost", "exact")
    table = Table(*columns, title=f"peaks of a step on {arguments.device}, torch {torch.__version__}")
    exact = True
    for name in arguments.steps:
        cells, is_exact = row(name, STEPS[name], arguments.device)
        table.add_row(*cells)
        exact &= is_exact
    Console(width=150).print(table)
    return 0 if exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
