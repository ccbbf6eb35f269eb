"""A transformer built from an architecture, to be traced under fake tensors: its parameters are allocated and never written."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.distributed._architecture import Architecture
from lowtide.distributed._setup import Setup

_DROPOUT = 0.1


class _Norm(nn.Module):
    """A root mean square norm with a kernel's memory: it saves its input, and computes in one op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight)


class _Dropout(nn.Module):
    """Dropout as GPUs do it: one op that saves a mask of a byte an entry. On a CPU ``F.dropout`` saves one of the input's type."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, _DROPOUT, True)[0]


class _Core(nn.Module):
    """What is between queries, keys and values, ``[batch, heads, time, head]`` each, and attention's result."""

    def __init__(self, model: Architecture, setup: Setup) -> None:
        super().__init__()
        self.groups, self.math = model.heads // model.kv_heads, setup.attention == "math"
        self.dropout = _dropout(model)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.math:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups > 1)
        k, v = (part.repeat_interleave(self.groups, 1) if self.groups > 1 else part for part in (k, v))
        scores = (q @ k.transpose(-1, -2)).div_(q.shape[-1] ** 0.5)  # in place, as kernels scale: queries are saved once
        return self.dropout(scores.softmax(-1)) @ v  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, model: Architecture, setup: Setup) -> None:
        super().__init__()
        self.model = model
        self.qkv = nn.Linear(model.width, model.attention_width + 2 * model.kv_width, bias=model.bias or model.qkv_bias)
        self.core = _Core(model, setup)
        self.out = nn.Linear(model.attention_width, model.width, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        model = self.model
        sizes = (model.attention_width, model.kv_width, model.kv_width)
        q, k, v = (part.unflatten(-1, (-1, model.head_size)).transpose(1, 2) for part in self.qkv(x).split(sizes, -1))
        return self.out(self.core(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.up = nn.Linear(model.width, model.hidden, bias=model.bias)
        self.gate = nn.Linear(model.width, model.hidden, bias=model.bias) if model.gated else None
        self.down = nn.Linear(model.hidden, model.width, bias=model.bias)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(wide)  # type: ignore[no-any-return]


class _Mixture(nn.Module):
    """Experts that are visited evenly: which token goes where is not known before there are weights, and does not change the memory."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.used = model.experts_used
        self.router = nn.Linear(model.width, model.experts, bias=False)
        self.experts = nn.ModuleList(_Mlp(model) for _ in range(model.experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights = self.router(tokens).float().softmax(-1).to(x.dtype)
        share = len(tokens) * self.used // len(self.experts)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows = torch.arange(share, device=x.device)
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights[rows, index, None])
        return mixed.view_as(x)


class _Block(nn.Module):
    def __init__(self, model: Architecture, setup: Setup) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = _norm(model), _norm(model)
        self.attention = _Attention(model, setup)
        self.mlp = _Mixture(model) if model.experts > 1 else _Mlp(model)
        self.dropout = _dropout(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


def _dropout(model: Architecture) -> nn.Module:
    return _Dropout() if model.dropout else nn.Identity()


def _norm(model: Architecture) -> nn.Module:
    return _Norm(model.width) if model.rms_norm else nn.LayerNorm(model.width)


class Decoder(nn.Module):
    """Tokens ``[batch, time]`` to logits ``[batch, time, vocabulary]``."""

    def __init__(self, model: Architecture, setup: Setup) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.width)
        self.positions = nn.Embedding(model.positions, model.width) if model.positions else None
        self.blocks = nn.Sequential(*(_Block(model, setup) for _ in range(model.layers)))
        self.norm = _norm(model)
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def decoder_step(model: Architecture, setup: Setup) -> tuple[Decoder, Callable[[], None]]:
    """A decoder and the forward and backward of a micro-batch, on memory that nobody has written to."""
    dtype = torch.bfloat16 if setup.value_bytes == 2 else torch.float32
    with torch.device("meta"):
        decoder = Decoder(model, setup).to(dtype)
    decoder.to_empty(device="cpu")
    if model.tied:
        decoder.head.weight = decoder.tokens.weight
    tokens = torch.zeros(setup.micro_batch, setup.sequence, dtype=torch.long)

    def step() -> None:
        logits = decoder(tokens)  # held to the end, as by the results that libraries return
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()  # type: ignore[no-untyped-call]

    return decoder, step
