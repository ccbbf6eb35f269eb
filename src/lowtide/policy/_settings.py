"""Settings of other frameworks, read as policies: DeepSpeed's configuration file, Megatron-LM's command line.

Neither framework has to be installed. What a setting asks for beyond replays, and lowtide does not do, is an error rather than left out.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lowtide.errors import InvalidInputError
from lowtide.policy._blocks import blocks
from lowtide.policy._full import full
from lowtide.policy._megatron import megatron_full, megatron_selective
from lowtide.policy._policy import Policy, PolicyRegion, Run
from lowtide.policy._selection import segments
from lowtide.records import CallSite, Decision

_BLOCK = "activation_checkpointing"
_MOVES = {
    "cpu_checkpointing": "moves the inputs of regions to the host",
    "partition_activations": "splits the inputs of regions over tensor parallel ranks",
}
_NO_MATTER = ("contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile", "number_checkpoints")
"""Where checkpoints lie in memory, when the device is waited for, and what is printed."""


def deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> Policy:
    """Replay blocks as DeepSpeed's ``activation_checkpointing`` block says.

    Every block is replayed whole; with ``number_checkpoints`` so many segments of blocks are, each as one. Passed over, for they change no
    decision, are ``contiguous_memory_optimization``, ``synchronize_checkpoint_boundary`` and ``profile``.

    Args:
        config: DeepSpeed's configuration, or the path of its JSON file.

    Raises:
        InvalidInputError: it cannot be read, has no such block or an unknown setting in it, or asks for what lowtide does not do
            (``cpu_checkpointing``, ``partition_activations``).
    """
    settings = _block_of(config)
    unknown = [key for key in settings if key not in (*_NO_MATTER, *_MOVES)]
    if unknown:
        raise InvalidInputError(
            f"{_BLOCK} has the setting {unknown[0]!r}, which is none of DeepSpeed's: {', '.join((*_MOVES, *_NO_MATTER))}"
        )
    for key, what in _MOVES.items():
        if settings.get(key):
            raise InvalidInputError(
                f"{_BLOCK}.{key} {what}, which lowtide does not do: set it to false to have regions replayed all the same"
            )
    count = settings.get("number_checkpoints")
    if count is None:
        return full()
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InvalidInputError(f"{_BLOCK}.number_checkpoints is a whole number above zero; found {count!r}")
    return InSegments(count)


def _block_of(config: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    found: Any = config
    if not isinstance(config, Mapping):
        try:
            found = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"cannot read the DeepSpeed configuration {os.fspath(config)!r}: {error}") from error
    block = found.get(_BLOCK) if isinstance(found, Mapping) else None
    if not isinstance(block, Mapping):
        raise InvalidInputError(f"the DeepSpeed configuration has no {_BLOCK!r} block; without it DeepSpeed checkpoints nothing by itself")
    return block


@dataclass(frozen=True, repr=False)
class InSegments(Policy):
    """Every block replayed, in a number of segments of about equal length.

    Attributes:
        count: of segments, or of blocks where there are fewer.
    """

    count: int

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """What ``full`` says."""
        return full().vote(site, run)

    @property
    def whole(self) -> bool:
        """It keeps nothing."""
        return True

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """The segments."""
        return segments(-(-len(blocks(model)) // self.count) or 1, full()).chosen(model)

    def __repr__(self) -> str:
        return f"in {self.count} segments"


def megatron(arguments: str | Sequence[str]) -> Policy:
    """Replay layers as Megatron-LM's command line says.

    Read are ``--recompute-activations``, ``--recompute-granularity``, ``--recompute-method``, ``--recompute-num-layers`` and
    ``--recompute-modules``; all other flags are passed over, so a whole command line may be given.

    Args:
        arguments: the command line, or its parts.

    Raises:
        InvalidInputError: no flag asks for a replay, values are missing or do not go together, or ``--distribute-saved-activations`` is
            there, which lowtide does not do.
    """
    parts = shlex.split(arguments) if isinstance(arguments, str) else list(arguments)
    given = _flags(parts)
    if "distribute-saved-activations" in given:
        raise InvalidInputError(
            "--distribute-saved-activations splits the inputs of regions over ranks, which lowtide does not do: leave it out"
        )
    granularity = _one(given, "recompute-granularity") or ("selective" if "recompute-activations" in given else None)
    if granularity == "selective":
        return megatron_selective(*given.get("recompute-modules", ()))
    if granularity == "full":
        layers = _one(given, "recompute-num-layers")
        return megatron_full(_one(given, "recompute-method"), None if layers is None else _number(layers))
    raise InvalidInputError(
        f"no flag of Megatron-LM asks for a replay (found {granularity or 'none'}): "
        "write --recompute-granularity full or selective, or --recompute-activations"
    )


def _flags(parts: Sequence[str]) -> dict[str, list[str]]:
    """Each flag with the values after it; ``--flag=value`` is read too."""
    found: dict[str, list[str]] = {}
    last: list[str] = []
    for part in parts:
        if part.startswith("--"):
            name, equals, value = part[2:].partition("=")
            last = found[name] = [value] if equals else []
        else:
            last.append(part)
    return found


def _one(given: Mapping[str, list[str]], name: str) -> str | None:
    values = given.get(name)
    if values is None:
        return None
    if len(values) != 1:
        raise InvalidInputError(f"--{name} takes one value; found {' '.join(values) or 'none'}")
    return values[0]


def _number(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InvalidInputError(f"--recompute-num-layers is a number above zero; found {text!r}")
    return int(text)
