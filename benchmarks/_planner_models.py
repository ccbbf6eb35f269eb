"""The models that planners are compared on, with their steps: forward and backward into gradients that are there already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.workloads.gpt import GPT
from lowtide.workloads.resnet import ResNet
from lowtide.workloads.unet import UNet

WIDTH, HEADS, SEQUENCES, LENGTH, VOCABULARY = 256, 4, 4, 256, 256


@dataclass(frozen=True)
class Subject:
    """A model, the modules that people would checkpoint, and its step."""

    model: nn.Module
    blocks: list[nn.Module]
    step: Callable[[], object]


def subject(model: nn.Module, blocks: list[nn.Module], loss: Callable[[], torch.Tensor]) -> Subject:
    def step() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss().backward()

    step()
    return Subject(model, blocks, step)


def gpt() -> Subject:
    """12 blocks, width 256, 4 sequences of 256."""
    model = GPT(blocks=12, width=WIDTH, heads=HEADS, context=LENGTH, dropout=0.0)
    x, y = torch.randint(VOCABULARY, (2, SEQUENCES, LENGTH)).unbind()
    return subject(model, list(model.blocks), lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))


def cnn() -> Subject:
    """Residual blocks with batch norm, uneven in width and resolution."""
    model = ResNet(widths=(24, 48, 96), depths=(2, 4, 3))
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    return subject(model, [block for stage in model.stages for block in stage], lambda: F.cross_entropy(model(x), y))


def unet() -> Subject:
    """Long skips: what a level makes on the way down is read on the way up."""
    model = UNet(widths=(24, 48, 72, 128))
    x = torch.randn(32, 3, 32, 32)
    return subject(model, [*model.down, model.bottom, *model.up], lambda: F.mse_loss(model(x), x))


def llama() -> Subject:
    """A Llama of transformers with 8 layers, width 256, its weights at random."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError as error:
        raise SystemExit("the model llama needs transformers: pip install 'lowtide[transformers]', or choose other models") from error
    sizes = {"hidden_size": WIDTH, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": HEADS}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, **sizes)).train()
    x = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
    return subject(model, list(model.model.layers), lambda: model(input_ids=x, labels=x).loss)


class Experts(nn.Module):
    """Each token goes through two of four MLPs, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            token, place = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.view_as(x)


class ExpertBlock(nn.Module):
    """Attention, then experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


def moe() -> Subject:
    """8 blocks of attention and a mixture of four experts, two for each token."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(ExpertBlock() for _ in range(8)), nn.Linear(WIDTH, VOCABULARY))
    x, y = torch.randint(VOCABULARY, (2, SEQUENCES, LENGTH)).unbind()
    return subject(model, [*model][1:-1], lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten()))


class Translator(nn.Module):
    """PyTorch's encoder and decoder layers: every layer of the decoder reads what the encoder made."""

    def __init__(self) -> None:
        super().__init__()
        options = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**options) for _ in range(4))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**options) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, x = self.embedding(source), self.embedding(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


def translator() -> Subject:
    """Encoder and decoder of 4 layers each, width 256."""
    model = Translator()
    x, y = torch.randint(VOCABULARY, (2, SEQUENCES, LENGTH)).unbind()
    return subject(model, [*model.encoder, *model.decoder], lambda: F.cross_entropy(model(x, y).flatten(0, 1), y.flatten()))


SUBJECTS: dict[str, Callable[[], Subject]] = {"gpt": gpt, "cnn": cnn, "unet": unet, "llama": llama, "moe": moe, "translator": translator}
