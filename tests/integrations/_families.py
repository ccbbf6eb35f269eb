"""Small models of transformers from random weights, each with a batch: in training mode, with dropout wherever a family has it."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class _Transformers:
    """The library, imported when it is used: tests that lack it are skipped by their own modules, which import this one first."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module("transformers"), name)


T = _Transformers()
VOCABULARY = 64


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def tokens(batch: int = 2, length: int = 10) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def text() -> dict[str, Any]:
    given = tokens()
    mask = torch.ones_like(given)
    mask[1, -2:] = 0
    return {"input_ids": given, "labels": given, "attention_mask": mask}


def _decoder(name: str, config: str | None = None, **more: Any) -> Callable[..., Any]:
    """A family that is built like Llama."""

    def make(**options: Any) -> Any:
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
        chosen = getattr(T, config or f"{name}Config")(**sizes, **heads, **more, **options)
        return getattr(T, f"{name}ForCausalLM")(chosen), text()

    return make


def _gpt2(**options: Any) -> Any:
    return T.GPT2LMHeadModel(T.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=32, **options)), text()


def _t5(**options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    model = T.T5ForConditionalGeneration(T.T5Config(**sizes, decoder_start_token_id=0, **options))
    return model, {"input_ids": tokens(), "labels": tokens(length=7)}


_ENCODER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}


def _bert(**options: Any) -> Any:
    config = T.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **_ENCODER, **options)
    return T.BertForMaskedLM(config), text()


def _vit(**options: Any) -> Any:
    drop = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = T.ViTConfig(image_size=16, patch_size=4, num_labels=5, **_ENCODER, **drop, **options)
    return T.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 2])}


def _whisper(**options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    drop = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1, "encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = T.WhisperForConditionalGeneration(T.WhisperConfig(**sizes, **layers, **widths, **drop, **marks, **options))
    return model, {"input_features": torch.randn(2, 8, 32), "labels": tokens(length=6)}


def _wav2vec2(**options: Any) -> Any:
    convolutions = {"conv_dim": (16, 16), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_conv_pos_embedding_groups": 4}
    masks = {"mask_time_prob": 0.3, "mask_time_length": 2, "layerdrop": 0.2, "num_conv_pos_embeddings": 8, "ctc_loss_reduction": "mean"}
    model = T.Wav2Vec2ForCTC(T.Wav2Vec2Config(vocab_size=VOCABULARY, **_ENCODER, **convolutions, **masks, **options))
    return model, {"input_values": torch.randn(2, 400), "labels": tokens(length=4)}


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": _decoder("Llama"),
    "qwen3": _decoder("Qwen3"),
    "mixtral": _decoder("Mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1, router_jitter_noise=0.1),
    "gemma": _decoder("Gemma"),
    "gemma3": _decoder("Gemma3", "Gemma3TextConfig", sliding_window=4),
    "gpt2": _gpt2,
    "t5": _t5,
    "bert": _bert,
    "vit": _vit,
    "whisper": _whisper,
    "wav2vec2": _wav2vec2,
}
WITH_CACHE = ("llama", "qwen3", "mixtral", "gemma", "gemma3", "gpt2", "t5", "whisper")


def make(family: str, attention: str = "sdpa", *, times: int = 1, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model and a batch for it, the same ones each time; ``times`` as many samples of it."""
    seed(0)
    model, batch = FAMILIES[family](attn_implementation=attention, **options)
    return model.train(), {name: torch.cat([given] * times) for name, given in batch.items()}


def train(model: Any, batch: dict[str, Any], steps: int = 3) -> list[torch.Tensor | None]:
    """Take a few steps; returns losses, gradients, buffers and random states."""
    seen: list[torch.Tensor | None] = []
    for step in range(steps):
        seed(step + 1)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        seen += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        seen += [*(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
    return seen


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    """Whether two runs are the same to the last bit."""
    return len(found) == len(expected) and all(
        one is other if one is None or other is None else torch.equal(bits(one), bits(other))
        for one, other in zip(found, expected, strict=True)
    )
