"""The memory of training on many ranks, estimated by closed forms before there is a cluster, and the replays that fit each stage.

Closed forms need no torch: an estimate is made on a laptop. Only to compare it with a trace does torch have to be there.
"""

from lowtide.distributed._activations import Term, layer_terms
from lowtide.distributed._architecture import Architecture, architecture, bundled
from lowtide.distributed._estimate import Estimate, RankMemory, estimate
from lowtide.distributed._gather_cost import GatherCost, measure_gather
from lowtide.distributed._in_pipeline import in_pipeline
from lowtide.distributed._on_ranks import on_ranks
from lowtide.distributed._replay import POLICIES, Replays
from lowtide.distributed._setup import ATTENTION, SCHEDULES, Mesh, Setup, parse_mesh
from lowtide.distributed._stage_plan import StagePlan, plan_stages
from lowtide.distributed._traced import Agreement, agreement, trace_architecture

__all__ = [
    "ATTENTION",
    "POLICIES",
    "SCHEDULES",
    "Agreement",
    "Architecture",
    "Estimate",
    "GatherCost",
    "Mesh",
    "RankMemory",
    "Replays",
    "Setup",
    "StagePlan",
    "Term",
    "agreement",
    "architecture",
    "bundled",
    "estimate",
    "in_pipeline",
    "layer_terms",
    "measure_gather",
    "on_ranks",
    "parse_mesh",
    "plan_stages",
    "trace_architecture",
]
