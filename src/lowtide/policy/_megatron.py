"""Megatron-LM's ``--recompute-granularity``, with its methods and its list of modules."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lowtide.errors import InvalidInputError, PolicyError
from lowtide.policy._blocks import blocks
from lowtide.policy._full import full
from lowtide.policy._jax import MATRIX_PRODUCTS
from lowtide.policy._match import anything, inside, op
from lowtide.policy._matchers import Matcher
from lowtide.policy._policy import Policy, PolicyRegion, Run
from lowtide.policy._preset import Preset, preset
from lowtide.policy._rules import ANY, NONE, Rule, keep
from lowtide.policy._selection import only, segments
from lowtide.records import CallSite, Decision

WHOLE = ("core_attn", "mlp", "moe", "shared_experts")
"""Modules of which the inputs are kept and the inside is recomputed ("normal checkpointing")."""

DISCARDED = ("layernorm", "moe_act", "mla_up_proj")
"""Modules whose outputs are not kept either ("output-discarding checkpointing")."""

_NAMES = {
    "core_attn": ("core_attention", "core_attn", "dot_product_attention"),
    "mlp": ("mlp", "feed_forward", "feedforward", "ffn", "ff"),
    "moe": ("moe", "block_sparse_moe", "moe_layer"),
    "shared_experts": ("shared_experts", "shared_expert"),
    "mla_up_proj": ("linear_q_up_proj", "linear_kv_up_proj", "q_b_proj", "kv_b_proj", "wq_b", "wkv_b"),
    "attention": ("attention", "self_attention", "attn", "self_attn"),
}
_ACTIVATIONS = op("F.silu", "F.gelu", "F.relu", "torch.sigmoid", "torch.tanh")


def megatron_full(method: str | None = None, layers: int | None = None) -> Policy:
    """Recompute whole layers: all of them, or by a method and a number.

    Megatron-LM's ``--recompute-granularity full`` with ``--recompute-method`` and ``--recompute-num-layers``: ``uniform`` divides the
    layers into units of so many and keeps the input of each unit; ``block`` recomputes the first so many layers one by one and leaves
    the rest as they are. Megatron counts in each pipeline stage; here it is the model that is given.

    Args:
        method: ``"uniform"``, ``"block"`` or ``None`` for all layers.
        layers: the number that belongs to a method.

    Raises:
        InvalidInputError: there is no such method, or the number does not go with it.
    """
    if method not in (None, "uniform", "block"):
        raise InvalidInputError(f"there is no recompute method {method!r}: write 'uniform', 'block' or None")
    if (method is None) != (layers is None):
        raise InvalidInputError(f"method and layers go together; found method={method!r} and layers={layers!r}")
    if layers is None:
        return preset("megatron_full")
    chosen = segments(layers, full()) if method == "uniform" else only(full(), first=layers)
    return Preset("megatron_full", (("method", repr(method)), ("layers", str(layers))), chosen)


def megatron_selective(*modules: str) -> Policy:
    """Recompute parts of each layer, and keep the rest.

    Megatron-LM's ``--recompute-granularity selective`` with ``--recompute-modules``: ``core_attn``, ``mlp`` (dense), ``moe`` and
    ``shared_experts`` keep their inputs and are recomputed inside; of ``layernorm``, ``moe_act`` and ``mla_up_proj`` the outputs are not
    kept either, and are made again for the layers that read them. Modules are found by the names that they usually have. Where attention
    is a function in a module instead of a module, the products of that module are kept and the rest of it, the core, is recomputed.

    Args:
        *modules: of these names; ``core_attn`` if none is given, as there.

    Raises:
        InvalidInputError: there is no such name.
    """
    chosen = modules or ("core_attn",)
    for name in chosen:
        if name not in (*WHOLE, *DISCARDED):
            raise InvalidInputError(f"there is no module {name!r} to recompute: write {', '.join((*WHOLE, *DISCARDED))}")
    return MegatronSelective(chosen)


@dataclass(frozen=True, repr=False)
class MegatronSelective(Policy):
    """Recomputes parts of each layer.

    Attributes:
        modules: names of the parts.
    """

    modules: tuple[str, ...]

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        """Nothing: it chooses modules, and each has a policy of its own."""
        return None

    def chosen(self, model: nn.Module) -> tuple[PolicyRegion, ...] | None:
        """The parts; or the blocks around them, where the outputs of parts are not kept.

        Raises:
            PolicyError: the model has no such part.
        """
        if not set(self.modules) & set(DISCARDED):
            found = [region for name in self.modules for region in _whole(model, name)]
            paths = {region.paths[0] for region in found}
            return tuple(region for region in found if not any(region.paths[0].startswith(f"{path}.") for path in paths))
        parts = (Rule(Decision.RECOMPUTE, (_parts(model, name),), ANY) for name in self.modules)
        policy = preset("megatron_selective", *parts, keep(anything()), modules=self.modules)
        return tuple(PolicyRegion((path,), policy) for path in blocks(model))

    def __repr__(self) -> str:
        return f"megatron_selective({', '.join(map(repr, self.modules))})"


def _whole(model: nn.Module, name: str) -> list[PolicyRegion]:
    """The modules of a name as regions."""
    paths = _paths(model, name)
    if paths or name != "core_attn":
        return [PolicyRegion((path,), full()) for path in _required(paths, name)]
    core = preset("megatron_selective", Rule(Decision.KEEP, (MATRIX_PRODUCTS,), NONE), modules=(name,))
    return [PolicyRegion((path,), core) for path in _required(_paths(model, "attention"), name)]


def _parts(model: nn.Module, name: str) -> Matcher:
    """All calls that belong to a part."""
    if name == "moe_act":
        return inside("**.experts") & _ACTIVATIONS
    if name == "core_attn" and not _paths(model, name):
        return inside(*_required(_paths(model, "attention"), name)) & ~MATRIX_PRODUCTS
    paths = _norms(model) if name == "layernorm" else _paths(model, name)
    return inside(*_required(paths, name))


def _norms(model: nn.Module) -> list[str]:
    """The norms that are direct children of blocks."""
    return [
        f"{path}.{name}"
        for path in blocks(model)
        for name, child in model.get_submodule(path).named_children()
        if "norm" in type(child).__name__.lower()
    ]


def _paths(model: nn.Module, name: str) -> list[str]:
    """Modules in blocks by the names that they usually have; an ``mlp`` with experts inside is a ``moe``."""
    names = (*_NAMES["mlp"], *_NAMES["moe"]) if name == "moe" else _NAMES[name]
    found = [path for path, module in model.named_modules() if path.rpartition(".")[2] in names and _has_experts(module) == (name == "moe")]
    return [path for path in found if not any(path.startswith(f"{outer}.") for outer in found)]


def _has_experts(module: nn.Module) -> bool:
    return any(path.rpartition(".")[2] == "experts" for path, _ in module.named_modules())


def _required(paths: list[str], name: str) -> list[str]:
    if not paths:
        raise PolicyError(
            f"megatron_selective({name!r}): the model has no module of that kind (looked for modules named "
            f"{', '.join(_NAMES.get(name, ('norm',)))}): use by_layer_type or recompute(inside(...)) with the names of this model"
        )
    return paths
