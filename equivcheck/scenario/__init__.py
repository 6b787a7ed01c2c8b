"""The nouns: what is trained, how it is spread, and both together. Frozen values; nothing here imports torch."""

from equivcheck.scenario.clipping import ClipNorm, ClipValue, NormType
from equivcheck.scenario.data import Data
from equivcheck.scenario.execution import Compile, Execution, Recompute
from equivcheck.scenario.layout import Layout
from equivcheck.scenario.mesh import Axis, Mesh
from equivcheck.scenario.model import Activation, Exercise, Layer, Model, Norm, Side
from equivcheck.scenario.optimizer import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Implementation,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from equivcheck.scenario.parallelism import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Distribution,
    LayerPlan,
    Replicate,
    Replicator,
    ShardingStrategy,
    Split,
    Spread,
    TensorParallel,
    Wrapping,
)
from equivcheck.scenario.parallelism_base import Parallelism
from equivcheck.scenario.pipeline import Pipeline, PipelineSchedule
from equivcheck.scenario.rounding import Compression, ElementType, LowPrecision, MixedPrecision
from equivcheck.scenario.scenario import Scenario
from equivcheck.scenario.schedule import CosineAnnealingLR, ExponentialLR, LinearLR, Schedule, StepLR
from equivcheck.scenario.training import Group, Loss, Precision, Select, Training, ZeroGrad

__all__ = [
    "ASGD",
    "DDP",
    "FSDP1",
    "FSDP2",
    "SGD",
    "SPMD",
    "Activation",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Axis",
    "ClipNorm",
    "ClipValue",
    "Compile",
    "Compression",
    "CosineAnnealingLR",
    "Data",
    "Distribution",
    "ElementType",
    "Execution",
    "Exercise",
    "ExponentialLR",
    "Group",
    "Implementation",
    "Layer",
    "LayerPlan",
    "Layout",
    "LinearLR",
    "Loss",
    "LowPrecision",
    "Mesh",
    "MixedPrecision",
    "Model",
    "NAdam",
    "Norm",
    "NormType",
    "Optimizer",
    "Parallelism",
    "Pipeline",
    "PipelineSchedule",
    "Precision",
    "RAdam",
    "RMSprop",
    "Recompute",
    "Replicate",
    "Replicator",
    "Rprop",
    "Scenario",
    "Schedule",
    "Select",
    "ShardingStrategy",
    "Side",
    "Split",
    "Spread",
    "StepLR",
    "TensorParallel",
    "Training",
    "Wrapping",
    "ZeroGrad",
]
