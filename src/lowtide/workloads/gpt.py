"""A decoder-only transformer on bytes of Python source.

Pre-norm blocks, causal attention by ``scaled_dot_product_attention``, dropout on, learned positions, and an output
layer tied to the embedding, after Radford et al., "Language models are unsupervised multitask learners" (2019).
The default size is one where activations are most of the peak and a step takes some 0.4 s on one core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.workload import Workload
from lowtide.workloads.text import corpus

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GPT", "gpt"]

VOCABULARY = 256


class Attention(nn.Module):
    """Causal multi-head self-attention, ``[batch, time, width]`` to the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each position look at itself and at what came before it."""
        batch, time, width = x.shape
        # [3, batch, heads, time, width of a head]
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the stream what attention and perceptron make of it."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Bytes ``[batch, time]`` to logits ``[batch, time, 256]``."""

    def __init__(self, *, blocks: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_init)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict, at each position, the byte that follows."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def gpt(
    *,
    blocks: int = 8,
    width: int = 128,
    heads: int = 4,
    context: int = 128,
    batch: int = 16,
    dropout: float = 0.1,
    corpus_bytes: int = 2**20,
    device: str = "cpu",
) -> Workload:
    """A transformer that learns to write Python, trained by AdamW.

    Args:
        blocks: transformer blocks.
        width: of the residual stream; a multiple of ``heads``.
        heads: of attention.
        context: bytes that a sequence has.
        batch: sequences a step.
        dropout: probability, on attention weights and residual branches.
        corpus_bytes: how much of the standard library to train on.
        device: where model and data live.

    Returns:
        A workload whose step returns its loss, a scalar.
    """
    model = GPT(blocks=blocks, width=width, heads=heads, context=context, dropout=dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    text = corpus(corpus_bytes).to(device)

    def step() -> Tensor:
        optimizer.zero_grad()
        tokens, following = _batch(text, batch, context)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return Workload(model, step, optimizer, tokens_per_step=batch * context, name="gpt")


def _batch(text: Tensor, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """Sequences from random places, and the same sequences one byte further, ``[batch, context]`` int64 each."""
    starts = torch.randint(len(text) - context, (batch, 1)).to(text.device)
    window = text[starts + torch.arange(context + 1, device=text.device)].long()
    return window[:, :-1], window[:, 1:]


def _init(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
