"""Hypothesis strategies for scenarios and programs: valid by construction, composable, shrinking to simple examples. No torch."""

from equivcheck.strategies.layer import layers
from equivcheck.strategies.layout import executions, layouts, meshes
from equivcheck.strategies.model import models
from equivcheck.strategies.optimizer import optimizers
from equivcheck.strategies.parallelism import ddp, fsdp1, fsdp2, mixed_precisions, pipeline, replicate, spmd, tensor_parallel
from equivcheck.strategies.program import programs
from equivcheck.strategies.scenario import frontier, scenarios
from equivcheck.strategies.token_model import attentions, cross_entropies, experts, gated_mlps, token_models
from equivcheck.strategies.training import clippings, data, groups, schedules, trainings

__all__ = [
    "attentions",
    "clippings",
    "cross_entropies",
    "data",
    "ddp",
    "executions",
    "experts",
    "frontier",
    "fsdp1",
    "fsdp2",
    "gated_mlps",
    "groups",
    "layers",
    "layouts",
    "meshes",
    "mixed_precisions",
    "models",
    "optimizers",
    "pipeline",
    "programs",
    "replicate",
    "scenarios",
    "schedules",
    "spmd",
    "tensor_parallel",
    "token_models",
    "trainings",
]
