"""Frozen dataclasses that describe a training, its layout over ranks, and both together. Nothing here imports torch."""

from equivcheck.scenario.clipping import ClipNorm, ClipValue, NormType
from equivcheck.scenario.context_parallel import AttentionExchange, ContextParallel, LoadBalancer
from equivcheck.scenario.data import Data
from equivcheck.scenario.execution import Checkpointing, Compile, Execution
from equivcheck.scenario.expert_parallel import ExpertParallel, ExpertStorage
from equivcheck.scenario.experts import Experts, ScoreFunction
from equivcheck.scenario.layer_base import Activation, AnyLayer, AuxiliaryLinear, Norm, ShapeOp
from equivcheck.scenario.layout import Layout
from equivcheck.scenario.local_data_parallel import LocalDataParallel
from equivcheck.scenario.loss import CrossEntropy, IgnoredLabels, Loss
from equivcheck.scenario.mesh import Axis, Mesh
from equivcheck.scenario.model import Layer, Model
from equivcheck.scenario.optimizer import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    AdjustLR,
    Implementation,
    Muon,
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
    Replicate,
    Replicator,
    ShardingStrategy,
    Wrapping,
)
from equivcheck.scenario.parallelism_base import Parallelism, ParameterOwner
from equivcheck.scenario.pipeline import Pipeline, PipelineSchedule
from equivcheck.scenario.rounding import Compression, ElementType, LowPrecision, MixedPrecision
from equivcheck.scenario.scenario import Resume, Scenario
from equivcheck.scenario.schedule import CosineAnnealingLR, ExponentialLR, LinearLR, Schedule, StepLR
from equivcheck.scenario.tensor_parallel import (
    ActivationSharding,
    Collectives,
    LayerPlan,
    LocalTensorParallel,
    PlannedParallelism,
    Split,
    TensorParallel,
)
from equivcheck.scenario.token_layers import Attention, GatedMLP, Head, Tokens
from equivcheck.scenario.training import ParameterGroup, ParameterSelection, Precision, Training, ZeroGrad

__all__ = [
    "ASGD",
    "DDP",
    "FSDP1",
    "FSDP2",
    "SGD",
    "SPMD",
    "Activation",
    "ActivationSharding",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "AdjustLR",
    "AnyLayer",
    "Attention",
    "AttentionExchange",
    "AuxiliaryLinear",
    "Axis",
    "Checkpointing",
    "ClipNorm",
    "ClipValue",
    "Collectives",
    "Compile",
    "Compression",
    "ContextParallel",
    "CosineAnnealingLR",
    "CrossEntropy",
    "Data",
    "Distribution",
    "ElementType",
    "Execution",
    "ExpertParallel",
    "ExpertStorage",
    "Experts",
    "ExponentialLR",
    "GatedMLP",
    "Head",
    "IgnoredLabels",
    "Implementation",
    "Layer",
    "LayerPlan",
    "Layout",
    "LinearLR",
    "LoadBalancer",
    "LocalDataParallel",
    "LocalTensorParallel",
    "Loss",
    "LowPrecision",
    "Mesh",
    "MixedPrecision",
    "Model",
    "Muon",
    "NAdam",
    "Norm",
    "NormType",
    "Optimizer",
    "Parallelism",
    "ParameterGroup",
    "ParameterOwner",
    "ParameterSelection",
    "Pipeline",
    "PipelineSchedule",
    "PlannedParallelism",
    "Precision",
    "RAdam",
    "RMSprop",
    "Replicate",
    "Replicator",
    "Resume",
    "Rprop",
    "Scenario",
    "Schedule",
    "ScoreFunction",
    "ShapeOp",
    "ShardingStrategy",
    "Split",
    "StepLR",
    "TensorParallel",
    "Tokens",
    "Training",
    "Wrapping",
    "ZeroGrad",
]
