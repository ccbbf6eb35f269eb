"""What a decoder-only transformer is made of, as far as its memory and arithmetic depend on it; read from a config file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowtide.errors import InvalidInputError

CONFIGS = files("lowtide.distributed").joinpath("configs")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer.

    Attributes:
        name: of the model.
        layers: transformer blocks.
        width: of the residual stream.
        heads, kv_heads, head_size: of attention; fewer key-value heads than heads is grouped-query attention.
        hidden: width inside the MLP, of each expert where there are several.
        vocabulary: entries of it.
        gated: the MLP multiplies two projections (SwiGLU): three matrices; else two.
        rms_norm: norms have a scale only; else scale and shift.
        bias: linear layers have a bias.
        qkv_bias: those that make queries, keys and values have one, whatever the others have.
        qk_norm: queries and keys are normalised by head.
        positions: learned positions; 0 where they are rotary.
        tied: the head uses the matrix of the embedding.
        dropout: masks are drawn after attention's softmax, after attention and after the MLP.
        experts, experts_used: of a mixture, and how many a token visits; 1 and 1 without.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    gated: bool = True
    rms_norm: bool = True
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    positions: int = 0
    tied: bool = False
    dropout: bool = False
    experts: int = 1
    experts_used: int = 1

    @property
    def attention_width(self) -> int:
        """Entries of all queries of a token."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Entries of all keys of a token."""
        return self.kv_heads * self.head_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm of the residual stream."""
        return self.width * (1 if self.rms_norm else 2)

    @property
    def attention_matrices(self) -> int:
        """Parameters of attention's four matrices."""
        return 2 * self.width * (self.attention_width + self.kv_width)

    @property
    def mlp_matrices(self) -> int:
        """Parameters of one expert's matrices."""
        return (3 if self.gated else 2) * self.width * self.hidden

    @property
    def router_parameters(self) -> int:
        """Parameters of the layer that picks experts."""
        return self.width * self.experts if self.experts > 1 else 0

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        norms = 2 * self.norm_parameters + (2 * self.head_size if self.qk_norm else 0)
        qkv_bias = self.attention_width + 2 * self.kv_width if self.bias or self.qkv_bias else 0
        bias = self.width + self.experts * ((2 if self.gated else 1) * self.hidden + self.width) if self.bias else 0
        return self.attention_matrices + self.experts * self.mlp_matrices + self.router_parameters + norms + qkv_bias + bias

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first block."""
        return (self.vocabulary + self.positions) * self.width

    @property
    def head_parameters(self) -> int:
        """Parameters after the last block: the norm, and the head unless it is tied."""
        return self.norm_parameters + (0 if self.tied else self.vocabulary * self.width)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding_parameters + self.layers * self.layer_parameters + self.head_parameters


def bundled() -> tuple[str, ...]:
    """Names of the configs that come with lowtide."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in CONFIGS.iterdir() if entry.name.endswith(".json")))


def architecture(config: str | Path | Mapping[str, Any]) -> Architecture:
    """Read an architecture.

    Args:
        config: the name of a bundled config, the path of a Hugging Face ``config.json``, or what such a file holds.

    Raises:
        InvalidInputError: there is no such config, or it lacks what the memory depends on.

    >>> architecture("llama-2-7b").parameters
    6738415616
    """
    if isinstance(config, Mapping):
        return _read(config, str(config.get("_name_or_path") or config.get("model_type") or "model"))
    name = str(config)
    if name in bundled():
        return _read(json.loads(CONFIGS.joinpath(f"{name}.json").read_text(encoding="utf-8")), name)
    return _read(_load(Path(name)), name)


def _load(path: Path) -> Mapping[str, Any]:
    found = path / "config.json" if path.is_dir() else path
    if not found.is_file():
        raise InvalidInputError(f"there is no config {str(path)!r}: name one of {', '.join(bundled())}, or the path of a config.json")
    try:
        content = json.loads(found.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"cannot read {found} as JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidInputError(f"{found} holds {type(content).__name__}, not the settings of a model")
    return content


def _read(config: Mapping[str, Any], name: str) -> Architecture:
    """Take what is needed from a config; the GPT-2 family has names of its own."""
    kind = config.get("model_type", "llama")
    if config.get("is_encoder_decoder"):
        raise InvalidInputError(f"{name} has an encoder and a decoder: estimates are for decoder-only transformers; use lowtide.trace")
    width, heads = _number(config, name, "hidden_size", "n_embd"), _number(config, name, "num_attention_heads", "n_head")
    if kind in _OTHERWISE:
        raise InvalidInputError(
            f"{name} is of the family {kind!r}, whose blocks are built otherwise than those that the closed forms are of (norms, biases, "
            "positions): use lowtide.trace"
        )
    classic = kind in _CLASSIC or kind in _ROTARY_CLASSIC
    return Architecture(
        name=name,
        layers=_number(config, name, "num_hidden_layers", "n_layer"),
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or width // heads,
        hidden=config.get("moe_intermediate_size") or config.get("intermediate_size") or config.get("n_inner") or 4 * width,
        vocabulary=_number(config, name, "vocab_size"),
        gated=not classic,
        rms_norm=not classic,
        bias=classic or bool(config.get("mlp_bias") and config.get("attention_bias")),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias")),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        positions=_positions(config, name) if kind in _CLASSIC else 0,
        tied=bool(config.get("tie_word_embeddings", classic or kind.startswith("gemma"))),
        dropout=any(config.get(key) for key in ("resid_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout")),
        experts=config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 1,
        experts_used=config.get("num_experts_per_tok") or 1,
    )


_CLASSIC = frozenset({"gpt2", "gpt3", "megatron", "opt"})
_ROTARY_CLASSIC = frozenset({"gpt_neox", "starcoder2"})
_OTHERWISE = frozenset({"bloom", "codegen", "falcon", "gpt_bigcode", "gpt_neo", "gptj", "mamba", "mpt", "nemotron", "phi", "rwkv"})


def _positions(config: Mapping[str, Any], name: str) -> int:
    return _number(config, name, "n_positions", "max_position_embeddings")


def _number(config: Mapping[str, Any], name: str, *keys: str) -> int:
    value = next((config[key] for key in keys if key in config), None)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidInputError(f"the config of {name} needs {' or '.join(keys)}, a positive whole number; found {value!r}")
    return value
