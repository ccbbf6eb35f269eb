"""Which blocks a stage of a pipeline holds, and how many micro-batches are in flight there."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.distributed._architecture import Architecture
from lowtide.distributed._schedules import actions, most_in_flight
from lowtide.distributed._setup import Setup
from lowtide.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class Stage:
    """One rank's part of the pipeline.

    Attributes:
        index: from 0, where the embedding is.
        layers: blocks held.
        in_flight: micro-batches whose activations it holds at once; in an interleaved schedule it is no whole number.
        parameters: held, before ``tp`` and ``dp`` split them.
        largest_layer: parameters of the largest part that is gathered at once.
        first, last: it has the embedding; it has the head and the loss.
    """

    index: int
    layers: int
    in_flight: float
    parameters: int
    largest_layer: int
    first: bool
    last: bool


def stages(model: Architecture, setup: Setup) -> tuple[Stage, ...]:
    """Split a model evenly; the first stages take what is left over.

    Raises:
        InvalidInputError: there are more stages than blocks.
    """
    count = setup.mesh.pp
    if count * setup.chunks > model.layers:
        raise InvalidInputError(f"{model.name} has {model.layers} blocks, too few for {count} ranks with {setup.chunks} stages each")
    return tuple(_stage(model, setup, index) for index in range(count))


def _stage(model: Architecture, setup: Setup, index: int) -> Stage:
    count = setup.mesh.pp
    layers = model.layers // count + (index < model.layers % count)
    first, last = index == 0, index == count - 1
    ends = (model.embedding_parameters if first else 0) + (_head(model, count) if last else 0)
    largest = max(model.layer_parameters, model.embedding_parameters if first else 0, _head(model, count) if last else 0)
    return Stage(index, layers, in_flight(setup, index), layers * model.layer_parameters + ends, largest, first, last)


def _head(model: Architecture, stage_count: int) -> int:
    """A tied head on another rank than the embedding is a copy of it."""
    copy = model.vocabulary * model.width if model.tied and stage_count > 1 else 0
    return model.head_parameters + copy


def in_flight(setup: Setup, index: int) -> float:
    """Micro-batches whose activations stage ``index`` holds at once.

    GPipe holds all m (Huang et al. 2019). 1F1B lets stage i of p hold min(p − i, m) (Narayanan et al. 2021, section 2.2). With v
    chunks a rank, the first stage holds 1 + (p − 1) / (p v) times as much (Korthikanti et al. 2022, section 4.2.3), and each later one
    two chunks less, for it starts its backward two turns earlier. The zero-bubble schedule that keeps 1F1B's peak (ZB-H1, Qi et al.
    2023) holds on every stage what 1F1B does on the first: stage i has i of them waiting for the gradients of weights.

    >>> from lowtide.distributed import Mesh
    >>> [in_flight(Setup(sequence=1, micro_batches=8, mesh=Mesh(pp=4)), stage) for stage in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    """
    order = actions(setup.schedule, index, setup.mesh.pp, setup.micro_batches, setup.chunks)
    return most_in_flight(order) / setup.chunks
