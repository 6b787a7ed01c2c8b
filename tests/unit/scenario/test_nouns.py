"""Tests for the ranges of scenario fields. Errors name the field, the value and the expected values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import equivcheck.scenario as nouns
from equivcheck.errors import InvalidScenario
from equivcheck.scenario import (
    ASGD,
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    SPMD,
    ActivationSharding,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Attention,
    Axis,
    ClipNorm,
    ClipValue,
    Compile,
    Compression,
    CosineAnnealingLR,
    CrossEntropy,
    Data,
    ElementType,
    Execution,
    Experts,
    ExponentialLR,
    GatedMLP,
    Head,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    LinearLR,
    LoRALinear,
    Mesh,
    MeshDims,
    MixedPrecision,
    Model,
    Muon,
    NAdam,
    Optimizer,
    ParameterGroup,
    Pipeline,
    PipelineSchedule,
    RAdam,
    Replicate,
    Replicator,
    Resume,
    RMSprop,
    Rprop,
    Scenario,
    ShapeOp,
    ShardingStrategy,
    Split,
    StepLR,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.scenario.optimizer import OPTIMIZERS

Noun = Callable[..., Any]
Invalid = tuple[Noun, dict[str, Any], str]

MODEL = Model(features=2, layers=(Layer(width=2), Layer(width=3)))
TRAINING = Training(model=MODEL, data=Data(microbatches=(2,)))
DP = Axis(name="dp", size=2)
MESH = Mesh(axes=(DP,))
HYBRID = Mesh(axes=(Axis(name="dp_replicate", size=2), Axis(name="dp_shard", size=2)))
LAYOUT = Layout(mesh=MESH, parallelisms=(DDP(),))

a_model = partial(Model, features=2)
a_training = partial(Training, model=MODEL, data=Data(microbatches=(2,)))
a_scenario = partial(Scenario, training=TRAINING, layout=LAYOUT)

a_pipeline = partial(Layout, mesh=Mesh(axes=(Axis(name="pp", size=3),)))
LOOPED = Pipeline(schedule=PipelineSchedule.LOOPED_BFS, stages_per_rank=3)

POSITIVE = "is not valid. Expected a finite number above 0."
NOT_NEGATIVE = "is not valid. Expected a finite number of at least 0."

a_token_model = partial(Model, features=2, length=3, source=Tokens(vocabulary=3), layers=(Layer(width=2),))

OF_TOKEN_MODELS: list[Invalid] = [
    (Tokens, {"vocabulary": 1}, "Tokens.vocabulary 1 is not valid. Expected 2 to 64"),
    (Tokens, {"vocabulary": 3, "padding": 3}, "Tokens.padding 3 is not valid. Expected None or a token from 0 to 2."),
    (Attention, {"num_heads": 33}, "Attention.num_heads 33 is not valid. Expected 1 to 32"),
    (Attention, {"num_heads": 2, "num_kv_heads": 3}, "Attention.num_kv_heads 3 is not valid. Expected 1 to 2"),
    (
        Attention,
        {"num_heads": 3, "num_kv_heads": 2},
        "Attention.num_kv_heads 2 is not valid. Expected a divisor of num_heads (3)",
    ),
    (Attention, {"head_dim": 3, "rotary": True}, "Attention.head_dim 3 is not valid. Expected an even number if rotary is True."),
    (Attention, {"dropout": 1.0}, "Attention.dropout 1.0 is not valid. Expected 0.0 to 0.9"),
    (GatedMLP, {"hidden": 0}, "GatedMLP.hidden 0 is not valid. Expected 1 to 32"),
    (LoRALinear, {"rank": 0}, "LoRALinear.rank 0 is not valid. Expected 1 to 32"),
    (LoRALinear, {"rank": 1, "alpha": -1.0}, "LoRALinear.alpha -1.0 is not valid. Expected 0.0 to 64.0"),
    (GatedMLP, {"hidden": 1, "dropout": -0.1}, "GatedMLP.dropout -0.1 is not valid. Expected 0.0 to 0.9"),
    (Experts, {"hidden": 33}, "Experts.hidden 33 is not valid. Expected 1 to 32"),
    (Experts, {"hidden": 1, "num_experts": 1}, "Experts.num_experts 1 is not valid. Expected 2 to 32"),
    (Experts, {"hidden": 1, "top_k": 3}, "Experts.top_k 3 is not valid. Expected 1 to 2"),
    (Experts, {"hidden": 1, "dropout": 1.0}, "Experts.dropout 1.0 is not valid. Expected 0.0 to 0.9"),
    (
        Experts,
        {"hidden": 1, "balance_per_sequence": True},
        "Experts.balance_per_sequence True is not valid. Expected False if balance is 0",
    ),
    (Experts, {"hidden": 1, "grouped": True}, "Experts.grouped True is not valid. Expected False if dispatched is False"),
    (
        Experts,
        {"hidden": 1, "normalised": True},
        "Experts.normalised True is not valid: a single weight would always be 1. Expected False if top_k is 1.",
    ),
    (partial(Data, microbatches=(2, 2)), {"last_window": 0}, "Data.last_window 0 is not valid. Expected 1 to 4"),
    (CrossEntropy, {"label_smoothing": 1.0}, "CrossEntropy.label_smoothing 1.0 is not valid. Expected 0.0 to 0.9"),
    (CrossEntropy, {"z_loss": -1.0}, f"CrossEntropy.z_loss -1.0 {NOT_NEGATIVE}"),
    (a_token_model, {"length": 17}, "Model.length 17 is not valid. Expected 1 to 16"),
    (a_token_model, {"document_length": 0}, "Model.document_length 0 is not valid. Expected 1 to 16"),
    (a_token_model, {"length": None}, "Model.length None is not valid. Expected 1 to 16 if source is Tokens"),
    (
        Head,
        {"tied": True, "predicts_two": True},
        "Head.tied True is not valid: the embedding has no second projection. Expected False if predicts_two is True.",
    ),
    (a_token_model, {"source": None, "head": Head()}, "Model.head Head() is not valid. Expected None if source is None"),
    (
        a_token_model,
        {"layers": (Layer(width=3),), "head": Head(tied=True)},
        "Head.tied True is not valid. Expected False, or equal features before (2) and after (3) the layers.",
    ),
    (
        a_token_model,
        {"layers": (Layer(width=2, shape_op=ShapeOp.VIEW),)},
        "Layer.shape_op ShapeOp.VIEW is not valid: rows are sequences. Expected None in layer 0.",
    ),
    (a_model, {"layers": (Attention(),)}, "Model.length None is not valid. Expected 1 to 16 if layer 0 is of class Attention."),
    (
        a_token_model,
        {"layers": (GatedMLP(hidden=2), Layer(width=2, shares=0))},
        "Layer.shares 0 is not valid. Expected the index of a linear layer with its own weight, before layer 1.",
    ),
    (
        Training,
        {"model": Model(features=1, layers=(Layer(width=1),)), "data": Data(microbatches=(2,)), "loss": CrossEntropy()},
        "Training.loss CrossEntropy() is not valid. "
        "Expected a model with at least two outputs, or a loss other than CrossEntropy.",
    ),
    (
        Training,
        {
            "model": Model(features=1, layers=(Layer(width=2),)),
            "data": Data(microbatches=(2,), batch_dim=1),
            "loss": CrossEntropy(),
        },
        "Data.batch_dim 1 is not valid. Expected 0 if the loss is a CrossEntropy and rows are not sequences.",
    ),
]
"""Class or factory, its arguments, and a part of the error."""

OF_MODELS: list[Invalid] = [
    (Layer, {"width": 0}, "Layer.width 0 is not valid. Expected 1 to 32"),
    (Layer, {"width": 33}, "Layer.width 33 is not valid. Expected 1 to 32"),
    (Layer, {"width": 1, "dropout": 0.91}, "Layer.dropout 0.91 is not valid. Expected 0.0 to 0.9"),
    (Layer, {"width": 1, "dropout": math.nan}, "Layer.dropout nan is not valid. Expected 0.0 to 0.9"),
    (Model, {"features": 0, "layers": (Layer(width=1),)}, "Model.features 0 is not valid. Expected 1 to 32"),
    (a_model, {"layers": ()}, "Model.layers of length 0 is not valid. Expected 1 to 8 layers."),
    (a_model, {"layers": (Layer(width=1),) * 9}, "Model.layers of length 9 is not valid. Expected 1 to 8 layers."),
    (
        a_model,
        {"layers": (Layer(width=1, frozen=True),)},
        "Model.layers is not valid: no layer is trained and also owns its weight. Expected at least one such layer.",
    ),
    (
        a_model,
        {"layers": (Layer(width=3, residual=True),)},
        "Layer.residual True is not valid. Expected False, or equal input (2) and output (3) features in layer 0.",
    ),
    (
        a_model,
        {"layers": (Layer(width=2), Layer(width=2, shares=1))},
        "Layer.shares 1 is not valid. Expected the index of a linear layer with its own weight, before layer 1.",
    ),
    (
        a_model,
        {"layers": (Layer(width=2), Layer(width=2, shares=-1))},
        "Layer.shares -1 is not valid. Expected the index of a linear layer with its own weight, before layer 1.",
    ),
    (
        a_model,
        {"layers": (Layer(width=2), Layer(width=2, shares=0), Layer(width=2, shares=1))},
        "Layer.shares 1 is not valid. Expected the index of a linear layer with its own weight, before layer 2.",
    ),
    (
        a_model,
        {"layers": (Layer(width=2), Layer(width=3, shares=0))},
        "Layer.shares 0 is not valid. Expected the index of a layer with the same input and output features as layer 1.",
    ),
]

OF_OPTIMIZERS: list[Invalid] = [
    (SGD, {"momentum": 1.5}, "SGD.momentum 1.5 is not valid. Expected 0.0 to 1.0"),
    (SGD, {"dampening": -0.5}, "SGD.dampening -0.5 is not valid. Expected 0.0 to 1.0"),
    (SGD, {"nesterov": True}, "SGD.nesterov True is not valid. Expected False, or momentum above 0 and dampening 0."),
    (
        SGD,
        {"nesterov": True, "momentum": 0.5, "dampening": 0.5},
        "SGD.nesterov True is not valid. Expected False, or momentum above 0 and dampening 0.",
    ),
    *((kind, {"eps": 0.0}, f"{kind.__name__}.eps 0.0 {POSITIVE}") for kind in (Adam, AdamW, Adamax, NAdam, RAdam)),
    *((kind, {"eps": 0.0}, f"{kind.__name__}.eps 0.0 {POSITIVE}") for kind in (Adagrad, Adadelta, RMSprop)),
    *(
        (kind, {"betas": (0.9, 1.0)}, f"{kind.__name__}.betas (0.9, 1.0) is not valid. Expected two numbers in [0, 1)")
        for kind in (Adam, AdamW, Adamax, NAdam, RAdam)
    ),
    (NAdam, {"momentum_decay": -0.1}, f"NAdam.momentum_decay -0.1 {NOT_NEGATIVE}"),
    (Adagrad, {"lr_decay": -0.1}, f"Adagrad.lr_decay -0.1 {NOT_NEGATIVE}"),
    (Adagrad, {"initial_accumulator_value": math.inf}, f"Adagrad.initial_accumulator_value inf {NOT_NEGATIVE}"),
    (Adadelta, {"rho": 1.1}, "Adadelta.rho 1.1 is not valid. Expected 0.0 to 1.0"),
    (RMSprop, {"alpha": 1.1}, "RMSprop.alpha 1.1 is not valid. Expected 0.0 to 1.0"),
    (
        RMSprop,
        {"alpha": 0.0, "centered": True},
        "RMSprop.alpha 0.0 is not valid. Expected a number in (0, 1) if centered is True.",
    ),
    (
        RMSprop,
        {"alpha": 1.0, "centered": True},
        "RMSprop.alpha 1.0 is not valid. Expected a number in (0, 1) if centered is True.",
    ),
    (RMSprop, {"momentum": 2.0}, "RMSprop.momentum 2.0 is not valid. Expected 0.0 to 1.0"),
    (Rprop, {"weight_decay": 0.1}, "Rprop.weight_decay 0.1 is not valid: this optimizer has no weight decay. Expected 0.0"),
    (Rprop, {"etas": (0.5, 1.0)}, "Rprop.etas (0.5, 1.0) is not valid. Expected a number in (0, 1) and a number above 1"),
    (
        Rprop,
        {"step_sizes": (2.0, 1.0)},
        "Rprop.step_sizes (2.0, 1.0) is not valid. Expected two finite numbers above 0 in increasing order.",
    ),
    (ASGD, {"lambd": -1.0}, f"ASGD.lambd -1.0 {NOT_NEGATIVE}"),
    (ASGD, {"alpha": -1.0}, f"ASGD.alpha -1.0 {NOT_NEGATIVE}"),
    (ASGD, {"t0": math.nan}, f"ASGD.t0 nan {NOT_NEGATIVE}"),
    (Adafactor, {"beta2_decay": 0.1}, "Adafactor.beta2_decay 0.1 is not valid. Expected a finite number of at most 0"),
    (
        Adafactor,
        {"eps": (-1.0, 1e-3)},
        "Adafactor.eps (-1.0, 0.001) is not valid. Expected None or a finite number of at least 0, followed by",
    ),
    (
        Adafactor,
        {"eps": (None, 0.0)},
        "Adafactor.eps (None, 0.0) is not valid. Expected None or a finite number of at least 0, followed by",
    ),
    (Adafactor, {"d": 0.5}, "Adafactor.d 0.5 is not valid. Expected a finite number of at least 1"),
    (Muon, {"momentum": 1.5}, "Muon.momentum 1.5 is not valid. Expected 0.0 to 1.0"),
    (Muon, {"ns_steps": 0}, "Muon.ns_steps 0 is not valid. Expected 1 to 20"),
    (Muon, {"maximize": True}, "Muon.maximize True is not valid: this optimizer cannot maximize. Expected False"),
    (
        Muon,
        {"implementation": Implementation.FOREACH},
        "Muon.implementation Implementation.FOREACH is not valid. Expected Implementation.FOR_LOOP.",
    ),
]

OF_TRAININGS: list[Invalid] = [
    (Data, {"microbatches": ()}, "Data.microbatches of length 0 is not valid. Expected 1 to 4 entries."),
    (Data, {"microbatches": (1,) * 5}, "Data.microbatches of length 5 is not valid. Expected 1 to 4 entries."),
    (Data, {"microbatches": (1, 65_537)}, "Data.microbatches entry 65537 is not valid. Expected 1 to 65536 rows."),
    (Data, {"microbatches": (1,), "batch_dim": 2}, "Data.batch_dim 2 is not valid. Expected 0 to 1"),
    (ParameterGroup, {"lr_factor": 0.0}, f"ParameterGroup.lr_factor 0.0 {POSITIVE}"),
    (ParameterGroup, {"weight_decay": -0.1}, f"ParameterGroup.weight_decay -0.1 {NOT_NEGATIVE}"),
    (StepLR, {"step_size": 6}, "StepLR.step_size 6 is not valid. Expected 1 to 5"),
    (StepLR, {"gamma": 0.0}, f"StepLR.gamma 0.0 {POSITIVE}"),
    (ExponentialLR, {"gamma": -1.0}, f"ExponentialLR.gamma -1.0 {POSITIVE}"),
    (LinearLR, {"start_factor": 0.0}, f"LinearLR.start_factor 0.0 {POSITIVE}"),
    (LinearLR, {"start_factor": 1.5}, "LinearLR.start_factor 1.5 is not valid. Expected 0.0 to 1.0"),
    (LinearLR, {"total_iters": 0}, "LinearLR.total_iters 0 is not valid. Expected 1 to 5"),
    (CosineAnnealingLR, {"T_max": 11}, "CosineAnnealingLR.T_max 11 is not valid. Expected 1 to 10"),
    (ClipNorm, {"max_norm": math.inf}, f"ClipNorm.max_norm inf {POSITIVE}"),
    (ClipValue, {"clip_value": 0.0}, f"ClipValue.clip_value 0.0 {POSITIVE}"),
    (a_training, {"steps": 11}, "Training.steps 11 is not valid. Expected 1 to 10"),
    (a_training, {"seed": 2**32}, "Training.seed 4294967296 is not valid. Expected 0 to 4294967295"),
    (
        a_training,
        {"optimizer": Rprop(), "groups": (ParameterGroup(), ParameterGroup(weight_decay=0.1))},
        "Group.weight_decay 0.1 is not valid. Expected 0.0 if the optimizer is Rprop.",
    ),
    (
        a_training,
        {"optimizer": Muon()},
        "Training.model is not valid: Muon only updates parameters with two dims. Expected a model without bias, norm and scale.",
    ),
    (
        a_training,
        {"optimizer": Muon(), "model": Model(features=2, layers=(Layer(width=2, bias=False),), scale=True)},
        "Training.model is not valid: Muon only updates parameters with two dims. Expected a model without bias, norm and scale.",
    ),
]

OF_LAYOUTS: list[Invalid] = [
    (Axis, {"name": "dp", "size": 0}, "Axis.size 0 is not valid. Expected 1 to 1048576"),
    (Mesh, {"axes": ()}, "Mesh.axes of length 0 is not valid. Expected 1 to 3 axes."),
    (Mesh, {"axes": (DP, DP)}, "Mesh.axes with the names ('dp', 'dp') is not valid. Expected distinct names."),
    (MixedPrecision, {}, "MixedPrecision() is not valid. Expected at least one of param, reduce, output."),
    (
        FSDP1,
        {"mixed_precision": MixedPrecision(output=ElementType.FLOAT16)},
        "FSDP1.mixed_precision MixedPrecision(output=ElementType.FLOAT16) is not valid: FullyShardedDataParallel does",
    ),
    (FSDP2, {"gradient_divide_factor": 0.0}, f"FSDP2.gradient_divide_factor 0.0 {POSITIVE}"),
    (
        FSDP2,
        {"layers_per_unit": 2},
        "FSDP2.layers_per_unit 2 is not valid. Expected 1, or more if wrapping is Wrapping.PER_LAYER.",
    ),
    (
        FSDP2,
        {"layers_per_unit": 0, "wrapping": Wrapping.PER_LAYER},
        "FSDP2.layers_per_unit 0 is not valid. Expected 1, or more if wrapping is Wrapping.PER_LAYER.",
    ),
    (FSDP2, {"reshard_to": 1}, "FSDP2.reshard_to 1 is not valid. Expected None, or at least 2 if reshard_after_forward is True."),
    (
        FSDP2,
        {"reshard_to": 2, "reshard_after_forward": False},
        "FSDP2.reshard_to 2 is not valid. Expected None, or at least 2 if reshard_after_forward is True.",
    ),
    (
        FSDP2,
        {"shard_largest_dim": True, "shard_last_dim": True},
        "FSDP2.shard_largest_dim True is not valid. Expected False if shard_last_dim is True.",
    ),
    (
        FSDP2,
        {"replica_hook": True, "mesh_dims": MeshDims.SHARD},
        "FSDP2.replica_hook True is not valid. Expected False if mesh_dims is set.",
    ),
    (
        FSDP2,
        {"embedding_unit": True},
        "FSDP2.embedding_unit True is not valid. Expected False if wrapping is Wrapping.ROOT_ONLY.",
    ),
    (FSDP2, {"loss_chunks": 2}, "FSDP2.loss_chunks 2 is not valid. Expected 1, or 2 to 8 if head_unit is True."),
    (FSDP2, {"head_unit": True}, "FSDP2.head_unit True is not valid. Expected False if wrapping is Wrapping.ROOT_ONLY."),
    (
        FSDP2,
        {"mesh_dims": MeshDims.SHARD},
        "FSDP2.gradient_divide_factor None is not valid: the loss covers the full batch. Expected 1.0 if mesh_dims is set.",
    ),
    (DDP, {"bucket_cap_mb": 0.0}, f"DDP.bucket_cap_mb 0.0 {POSITIVE}"),
    (
        DDP,
        {"parameters_as_bucket_view": True},
        "DDP.parameters_as_bucket_view True is not valid. Expected False if zero_redundancy is False",
    ),
    (Replicate, {"bucket_cap_mb": 0.0}, f"Replicate.bucket_cap_mb 0.0 {POSITIVE}"),
    (
        Replicate,
        {"implementation": Replicator.FSDP, "compression": Compression.FP16},
        "Replicate.compression Compression.FP16 is not valid. Expected Compression.NONE if implementation is Replicator.FSDP",
    ),
    (
        Replicate,
        {"wrapping": Wrapping.PER_LAYER},
        "Replicate.wrapping Wrapping.PER_LAYER is not valid. Expected Wrapping.ROOT_ONLY if implementation is Replicator.DDP",
    ),
    (
        Replicate,
        {"implementation": Replicator.FSDP, "bucket_cap_mb": 1.0},
        "Replicate.bucket_cap_mb 1.0 is not valid. Expected 25.0 if implementation is Replicator.FSDP",
    ),
    (Execution, {"per_layer": True}, "Execution.per_layer True is not valid. Expected False if compile is Compile.NONE"),
    (
        LayerPlan,
        {"output": ActivationSharding.FEATURES},
        "LayerPlan.output ActivationSharding.FEATURES is not valid. Expected ActivationSharding.REPLICATED or ROWS if split is",
    ),
    (
        LayerPlan,
        {"split": Split.NOT_IN_PLAN, "output": ActivationSharding.ROWS},
        "LayerPlan.output ActivationSharding.ROWS is not valid. Expected ActivationSharding.REPLICATED if split is",
    ),
    (
        TensorParallel,
        {"plan": (LayerPlan(output=ActivationSharding.ROWS), LayerPlan(split=Split.NOT_IN_PLAN))},
        "TensorParallel.plan is not valid: a layer has output ActivationSharding.ROWS, and the next layer is Split.NOT_IN_PLAN",
    ),
    (TensorParallel, {"plan": ()}, "TensorParallel.plan of length 0 is not valid. Expected 1 to 8 entries, one per layer."),
    (
        TensorParallel,
        {"plan": (LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES),)},
        "TensorParallel.plan with last output ActivationSharding.FEATURES is not valid.",
    ),
    (
        Execution,
        {"whole_step": True, "compile": Compile.INDUCTOR},
        "Execution.whole_step True is not valid. Expected False if compile or compiled_autograd is set.",
    ),
    (Pipeline, {"num_chunks": 0}, "Pipeline.num_chunks 0 is not valid. Expected 1 to 16"),
    (
        Pipeline,
        {"stages_per_rank": 2},
        "Pipeline.stages_per_rank 2 is not valid. Expected 1 if schedule is PipelineSchedule.GPIPE",
    ),
    (
        Pipeline,
        {"schedule": PipelineSchedule.ZBV},
        "Pipeline.stages_per_rank 1 is not valid. Expected 2 if schedule is PipelineSchedule.ZBV",
    ),
    (
        Pipeline,
        {"boundaries": (0,)},
        "Pipeline.boundaries (0,) is not valid. Expected strictly increasing numbers of at least 1.",
    ),
    (
        Pipeline,
        {"boundaries": (2, 2)},
        "Pipeline.boundaries (2, 2) is not valid. Expected strictly increasing numbers of at least 1.",
    ),
    (
        a_pipeline,
        {"parallelisms": (LOOPED,)},
        "Pipeline.stages_per_rank 3 is not valid: each stage needs a layer. Expected at most 2 on 3 ranks.",
    ),
    (
        a_pipeline,
        {"parallelisms": (Pipeline(boundaries=(1,)),)},
        "Pipeline.boundaries (1,) is not valid. Expected () or 2 entries for 3 ranks x 1 stages.",
    ),
    (
        a_pipeline,
        {"parallelisms": (Pipeline(schedule=PipelineSchedule.ONE_F_ONE_B, num_chunks=2),)},
        "Pipeline.num_chunks 2 is not valid. Expected a number that PipelineSchedule.ONE_F_ONE_B can run on 3 ranks, such as 6.",
    ),
    (Layout, {"mesh": MESH, "parallelisms": ()}, "Layout.parallelisms () is not valid. Expected at least one parallelism"),
    (
        Layout,
        {"mesh": MESH, "parallelisms": (DDP(), SPMD())},
        "Layout.parallelisms of length 2 is not valid. Expected at most one for each of the axes ['dp'].",
    ),
    (
        Layout,
        {"mesh": HYBRID, "parallelisms": (DDP(),)},
        "Mesh.axes with the names ('dp_replicate', 'dp_shard') is not valid with ddp. Expected ('dp',).",
    ),
    (
        Layout,
        {"mesh": HYBRID, "parallelisms": (FSDP1(),)},
        "FSDP1.strategy ShardingStrategy.FULL_SHARD is not valid on the axes ('dp_replicate', 'dp_shard'). Expected a HYBRID",
    ),
    (
        Layout,
        {"mesh": MESH, "parallelisms": (FSDP1(strategy=ShardingStrategy.HYBRID_SHARD),)},
        "FSDP1.strategy ShardingStrategy.HYBRID_SHARD is not valid on the axes ('dp',). Expected a HYBRID strategy",
    ),
    (a_scenario, {"schedule_seed": -1}, "Scenario.schedule_seed -1 is not valid. Expected 0 to 4294967295"),
    (Resume, {"layout": LAYOUT, "steps": 0}, "Resume.steps 0 is not valid. Expected at least 1"),
    (a_scenario, {"resume": Resume(layout=LAYOUT)}, "Resume.steps 1 is not valid. Expected fewer steps than the training's 1."),
]

INVALID = OF_TOKEN_MODELS + OF_MODELS + OF_OPTIMIZERS + OF_TRAININGS + OF_LAYOUTS


@pytest.mark.parametrize(("noun", "fields", "words"), INVALID)
def test_what_is_outside_its_range_is_refused(noun: Noun, fields: dict[str, Any], words: str) -> None:
    """The error is one line with class, field, value and expected values."""
    with pytest.raises(InvalidScenario) as refused:
        noun(**fields)
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("field", "value", "words"), [("lr", 0.0, POSITIVE), ("weight_decay", -0.1, NOT_NEGATIVE)])
def test_every_optimizer_checks_what_all_have(kind: type[Optimizer], field: str, value: float, words: str) -> None:
    """An optimizer with its own checks also runs the common ones."""
    with pytest.raises(InvalidScenario) as refused:
        kind(**{field: value})
    assert str(refused.value) == f"{kind.__name__}.{field} {value} {words}"


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("implementation", Implementation)
def test_only_what_torch_has_on_cpu_is_taken(kind: type[Optimizer], implementation: Implementation) -> None:
    """An optimizer refuses an implementation that torch lacks, and lists the others."""
    if implementation in kind.implementations():
        assert kind(implementation=implementation).implementation is implementation
    else:
        with pytest.raises(InvalidScenario, match=r"Expected Implementation\.FOR_LOOP"):
            kind(implementation=implementation)


@pytest.mark.parametrize(
    ("noun", "fields"),
    [
        (RMSprop, {"alpha": 0.0}),
        (RMSprop, {"alpha": 1.0}),
        (RMSprop, {"alpha": 0.5, "centered": True}),
        (a_training, {"optimizer": Rprop(), "groups": (ParameterGroup(lr_factor=2.0),)}),
        (a_training, {"optimizer": SGD(), "groups": (ParameterGroup(weight_decay=0.1),)}),
    ],
)
def test_what_goes_together_is_taken(noun: Noun, fields: dict[str, Any]) -> None:
    """A value that is only refused in combination with another one is valid without it."""
    taken = noun(**fields)
    assert {name: getattr(taken, name) for name in fields} == fields


def test_every_check_is_tried() -> None:
    """Every class with a check has an invalid value in the tables above."""
    checked = {
        name
        for name, noun in vars(nouns).items()
        if inspect.isclass(noun) and "__post_init__" in vars(noun) and noun not in (Optimizer, nouns.PlannedParallelism)
    }
    tried = {getattr(noun, "func", noun).__name__ for noun, _, _ in INVALID}
    assert checked - tried == set()


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (3, 1, 2)])
def test_a_coordinate_is_row_major(shape: tuple[int, ...]) -> None:
    """Ranks along the last axis are consecutive, as in a C-ordered array."""
    mesh = Mesh(axes=tuple(Axis(name=f"axis{index}", size=size) for index, size in enumerate(shape)))
    assert [mesh.coordinate(rank) for rank in range(mesh.num_ranks)] == list(np.ndindex(*shape))


def test_a_layout_is_asked_for_its_parallelisms() -> None:
    """`of` filters by class, innermost first, and accepts several classes."""
    parallelisms = (nouns.TensorParallel(), nouns.FSDP2())
    layout = nouns.Layout(mesh=Mesh(axes=(Axis(name="dp", size=1), Axis(name="tp", size=1))), parallelisms=parallelisms)
    assert layout.of(nouns.FSDP2) == parallelisms[1:]
    assert layout.of(nouns.FSDP2, nouns.TensorParallel) == parallelisms
    assert layout.has(nouns.DDP, nouns.FSDP2)
    assert not layout.has(nouns.DDP)
