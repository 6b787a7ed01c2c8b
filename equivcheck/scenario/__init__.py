"""Frozen dataclasses that describe a training, its layout over ranks, and both together. Nothing here imports torch."""

from equivcheck.scenario.clipping import ClipNorm, ClipValue, NormType
from equivcheck.scenario.data import Data
from equivcheck.scenario.execution import Checkpointing, Compile, Execution
from equivcheck.scenario.layers.base import Activation, AnyLayer, AuxiliaryLinear, Norm, ShapeOp
from equivcheck.scenario.layers.experts import Experts, ScoreFunction
from equivcheck.scenario.layers.linear import Layer
from equivcheck.scenario.layers.lora import LoRALinear
from equivcheck.scenario.layers.token_layers import Attention, GatedMLP, Head, Tokens
from equivcheck.scenario.layout import Layout
from equivcheck.scenario.loss import CrossEntropy, IgnoredLabels, Loss, Normaliser
from equivcheck.scenario.mesh import Axis, Mesh
from equivcheck.scenario.model import Model
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
from equivcheck.scenario.parallelisms.base import Parallelism, ParameterOwner, StagePosition
from equivcheck.scenario.parallelisms.context_parallel import AttentionExchange, ContextParallel, LoadBalancer
from equivcheck.scenario.parallelisms.data_parallel import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Distribution,
    LocalDataParallel,
    MeshDims,
    Replicate,
    Replicator,
    ShardingStrategy,
    Wrapping,
)
from equivcheck.scenario.parallelisms.expert_parallel import ExpertParallel, ExpertStorage
from equivcheck.scenario.parallelisms.pipeline import Pipeline, PipelineSchedule
from equivcheck.scenario.parallelisms.tensor_parallel import (
    ActivationSharding,
    Collectives,
    LayerPlan,
    LocalTensorParallel,
    PlannedParallelism,
    Split,
    TensorParallel,
)
from equivcheck.scenario.rounding import Compression, ElementType, LowPrecision, MixedPrecision
from equivcheck.scenario.scenario import Resume, Scenario
from equivcheck.scenario.schedule import CosineAnnealingLR, ExponentialLR, LinearLR, Schedule, StepLR
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
    "LoRALinear",
    "LoadBalancer",
    "LocalDataParallel",
    "LocalTensorParallel",
    "Loss",
    "LowPrecision",
    "Mesh",
    "MeshDims",
    "MixedPrecision",
    "Model",
    "Muon",
    "NAdam",
    "Norm",
    "NormType",
    "Normaliser",
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
    "StagePosition",
    "StepLR",
    "TensorParallel",
    "Tokens",
    "Training",
    "Wrapping",
    "ZeroGrad",
]
