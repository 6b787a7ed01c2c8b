"""Rules of the nouns: a value outside its range is refused with the field, the value and what is allowed."""

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
    Group,
    Head,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    LinearLR,
    Mesh,
    MixedPrecision,
    Model,
    Muon,
    NAdam,
    Optimizer,
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

POSITIVE = "allowed: a finite number above 0"
NOT_NEGATIVE = "allowed: a finite number of at least 0"

a_token_model = partial(Model, features=2, length=3, source=Tokens(vocabulary=3), layers=(Layer(width=2),))

OF_TOKEN_MODELS: list[Invalid] = [
    (Tokens, {"vocabulary": 1}, "Tokens.vocabulary is 1; allowed: 2 to 64"),
    (Tokens, {"vocabulary": 3, "padding": 3}, "Tokens.padding is 3; allowed: None, or a token: 0 to 2"),
    (Attention, {"heads": 33}, "Attention.heads is 33; allowed: 1 to 32"),
    (Attention, {"heads": 2, "kv_heads": 3}, "Attention.kv_heads is 3; allowed: 1 to 2"),
    (Attention, {"heads": 3, "kv_heads": 2}, "Attention.kv_heads is 2; allowed: a divisor of heads (3)"),
    (Attention, {"head_width": 3, "rotary": True}, "Attention.head_width is 3; allowed: an even number with rotary positions"),
    (Attention, {"dropout": 1.0}, "Attention.dropout is 1.0; allowed: 0.0 to 0.9"),
    (GatedMLP, {"hidden": 0}, "GatedMLP.hidden is 0; allowed: 1 to 32"),
    (GatedMLP, {"hidden": 1, "dropout": -0.1}, "GatedMLP.dropout is -0.1; allowed: 0.0 to 0.9"),
    (Experts, {"hidden": 33}, "Experts.hidden is 33; allowed: 1 to 32"),
    (Experts, {"hidden": 1, "num_experts": 1}, "Experts.num_experts is 1; allowed: 2 to 32"),
    (Experts, {"hidden": 1, "top_k": 3}, "Experts.top_k is 3; allowed: 1 to 2"),
    (Experts, {"hidden": 1, "dropout": 1.0}, "Experts.dropout is 1.0; allowed: 0.0 to 0.9"),
    (
        Experts,
        {"hidden": 1, "normalised": True},
        "Experts.normalised is True; allowed: False with top_k 1: a single weight would be 1 whatever its score",
    ),
    (CrossEntropy, {"label_smoothing": 1.0}, "CrossEntropy.label_smoothing is 1.0; allowed: 0.0 to 0.9"),
    (CrossEntropy, {"z_loss": -1.0}, f"CrossEntropy.z_loss is -1.0; {NOT_NEGATIVE}"),
    (a_token_model, {"length": 17}, "Model.length is 17; allowed: 1 to 16"),
    (a_token_model, {"length": None}, "Model.length is None; allowed: 1 to 16 with tokens"),
    (a_token_model, {"source": None, "head": Head()}, "Model.head is Head(); allowed: None without tokens"),
    (
        a_token_model,
        {"layers": (Layer(width=3),), "head": Head(tied=True)},
        "Head.tied is True; allowed: only where as many features (3) leave the layers as enter (2)",
    ),
    (a_token_model, {"layers": (Layer(width=2, shape_op=ShapeOp.VIEW),)}, "allowed: None where rows are sequences, layer 0"),
    (a_model, {"layers": (Attention(),)}, "Model.length is None; allowed: 1 to 16 with Attention, layer 0"),
    (
        a_token_model,
        {"layers": (GatedMLP(hidden=2), Layer(width=2, shares=0))},
        "Layer.shares is 0; allowed: an earlier linear layer with its own weight, layer 1",
    ),
    (
        Training,
        {"model": Model(features=1, layers=(Layer(width=1),)), "data": Data(microbatches=(2,)), "loss": CrossEntropy()},
        "Training.loss is CrossEntropy(); allowed: CrossEntropy only with a model of two outputs and more",
    ),
    (
        Training,
        {
            "model": Model(features=1, layers=(Layer(width=2),)),
            "data": Data(microbatches=(2,), batch_dim=1),
            "loss": CrossEntropy(),
        },
        "Data.batch_dim is 1; allowed: 0 with CrossEntropy, where rows are no sequences",
    ),
]
"""A noun, or a maker of one, the fields that it gets, and what the refusal says."""

OF_MODELS: list[Invalid] = [
    (Layer, {"width": 0}, "Layer.width is 0; allowed: 1 to 32"),
    (Layer, {"width": 33}, "Layer.width is 33; allowed: 1 to 32"),
    (Layer, {"width": 1, "dropout": 0.91}, "Layer.dropout is 0.91; allowed: 0.0 to 0.9"),
    (Layer, {"width": 1, "dropout": math.nan}, "Layer.dropout is nan; allowed: 0.0 to 0.9"),
    (Model, {"features": 0, "layers": (Layer(width=1),)}, "Model.features is 0; allowed: 1 to 32"),
    (a_model, {"layers": ()}, "Model.layers has 0 layers; allowed: 1 to 8"),
    (a_model, {"layers": (Layer(width=1),) * 9}, "Model.layers has 9 layers; allowed: 1 to 8"),
    (a_model, {"layers": (Layer(width=1, frozen=True),)}, "Model.layers has no layer that is trained and has its own weight"),
    (a_model, {"layers": (Layer(width=3, residual=True),)}, "allowed: only where inputs (2) equal width (3), layer 0"),
    (a_model, {"layers": (Layer(width=2), Layer(width=2, shares=1))}, "Layer.shares is 1; allowed: an earlier linear layer"),
    (a_model, {"layers": (Layer(width=2), Layer(width=2, shares=-1))}, "Layer.shares is -1; allowed: an earlier linear layer"),
    (
        a_model,
        {"layers": (Layer(width=2), Layer(width=2, shares=0), Layer(width=2, shares=1))},
        "Layer.shares is 1; allowed: an earlier linear layer with its own weight, layer 2",
    ),
    (a_model, {"layers": (Layer(width=2), Layer(width=3, shares=0))}, "a layer with the same inputs and width, layer 1"),
]

OF_OPTIMIZERS: list[Invalid] = [
    (SGD, {"momentum": 1.5}, "SGD.momentum is 1.5; allowed: 0.0 to 1.0"),
    (SGD, {"dampening": -0.5}, "SGD.dampening is -0.5; allowed: 0.0 to 1.0"),
    (SGD, {"nesterov": True}, "SGD.nesterov is True; allowed: only with momentum above 0 and dampening 0"),
    (SGD, {"nesterov": True, "momentum": 0.5, "dampening": 0.5}, "SGD.nesterov is True; allowed: only with momentum"),
    *((kind, {"eps": 0.0}, f"{kind.__name__}.eps is 0.0; {POSITIVE}") for kind in (Adam, AdamW, Adamax, NAdam, RAdam)),
    *((kind, {"eps": 0.0}, f"{kind.__name__}.eps is 0.0; {POSITIVE}") for kind in (Adagrad, Adadelta, RMSprop)),
    *(
        (kind, {"betas": (0.9, 1.0)}, f"{kind.__name__}.betas is (0.9, 1.0); allowed: two numbers in [0, 1)")
        for kind in (Adam, AdamW, Adamax, NAdam, RAdam)
    ),
    (NAdam, {"momentum_decay": -0.1}, f"NAdam.momentum_decay is -0.1; {NOT_NEGATIVE}"),
    (Adagrad, {"lr_decay": -0.1}, f"Adagrad.lr_decay is -0.1; {NOT_NEGATIVE}"),
    (Adagrad, {"initial_accumulator_value": math.inf}, f"Adagrad.initial_accumulator_value is inf; {NOT_NEGATIVE}"),
    (Adadelta, {"rho": 1.1}, "Adadelta.rho is 1.1; allowed: 0.0 to 1.0"),
    (RMSprop, {"alpha": 1.1}, "RMSprop.alpha is 1.1; allowed: 0.0 to 1.0"),
    (RMSprop, {"alpha": 0.0, "centered": True}, "RMSprop.alpha is 0.0; allowed: a number in (0, 1) where centered"),
    (RMSprop, {"alpha": 1.0, "centered": True}, "RMSprop.alpha is 1.0; allowed: a number in (0, 1) where centered"),
    (RMSprop, {"momentum": 2.0}, "RMSprop.momentum is 2.0; allowed: 0.0 to 1.0"),
    (Rprop, {"weight_decay": 0.1}, "Rprop.weight_decay is 0.1; allowed: 0.0"),
    (Rprop, {"etas": (0.5, 1.0)}, "Rprop.etas is (0.5, 1.0); allowed: a number in (0, 1) and one above 1"),
    (Rprop, {"step_sizes": (2.0, 1.0)}, "Rprop.step_sizes is (2.0, 1.0); allowed: two finite numbers above 0 in rising order"),
    (ASGD, {"lambd": -1.0}, f"ASGD.lambd is -1.0; {NOT_NEGATIVE}"),
    (ASGD, {"alpha": -1.0}, f"ASGD.alpha is -1.0; {NOT_NEGATIVE}"),
    (ASGD, {"t0": math.nan}, f"ASGD.t0 is nan; {NOT_NEGATIVE}"),
    (Adafactor, {"beta2_decay": 0.1}, "Adafactor.beta2_decay is 0.1; allowed: a finite number of at most 0"),
    (Adafactor, {"eps": (-1.0, 1e-3)}, "Adafactor.eps is (-1.0, 0.001); allowed: None or a finite number of at least 0, and"),
    (Adafactor, {"eps": (None, 0.0)}, "Adafactor.eps is (None, 0.0); allowed: None or a finite number of at least 0, and"),
    (Adafactor, {"d": 0.5}, "Adafactor.d is 0.5; allowed: a finite number of at least 1"),
    (Muon, {"momentum": 1.5}, "Muon.momentum is 1.5; allowed: 0.0 to 1.0"),
    (Muon, {"ns_steps": 0}, "Muon.ns_steps is 0; allowed: 1 to 20"),
    (Muon, {"maximize": True}, "Muon.maximize is True; allowed: False"),
    (Muon, {"implementation": Implementation.FOREACH}, "is Implementation.FOREACH; allowed: Implementation.FOR_LOOP"),
]

OF_TRAININGS: list[Invalid] = [
    (Data, {"microbatches": ()}, "Data.microbatches has 0 entries; allowed: 1 to 4"),
    (Data, {"microbatches": (1,) * 5}, "Data.microbatches has 5 entries; allowed: 1 to 4"),
    (Data, {"microbatches": (1, 65_537)}, "Data.microbatches has one of 65537 rows; allowed: 1 to 65536"),
    (Data, {"microbatches": (1,), "batch_dim": 2}, "Data.batch_dim is 2; allowed: 0 to 1"),
    (Group, {"lr_factor": 0.0}, f"Group.lr_factor is 0.0; {POSITIVE}"),
    (Group, {"weight_decay": -0.1}, f"Group.weight_decay is -0.1; {NOT_NEGATIVE}"),
    (StepLR, {"step_size": 6}, "StepLR.step_size is 6; allowed: 1 to 5"),
    (StepLR, {"gamma": 0.0}, f"StepLR.gamma is 0.0; {POSITIVE}"),
    (ExponentialLR, {"gamma": -1.0}, f"ExponentialLR.gamma is -1.0; {POSITIVE}"),
    (LinearLR, {"start_factor": 0.0}, f"LinearLR.start_factor is 0.0; {POSITIVE}"),
    (LinearLR, {"start_factor": 1.5}, "LinearLR.start_factor is 1.5; allowed: 0.0 to 1.0"),
    (LinearLR, {"total_iters": 0}, "LinearLR.total_iters is 0; allowed: 1 to 5"),
    (CosineAnnealingLR, {"T_max": 11}, "CosineAnnealingLR.T_max is 11; allowed: 1 to 10"),
    (ClipNorm, {"max_norm": math.inf}, f"ClipNorm.max_norm is inf; {POSITIVE}"),
    (ClipValue, {"clip_value": 0.0}, f"ClipValue.clip_value is 0.0; {POSITIVE}"),
    (a_training, {"steps": 11}, "Training.steps is 11; allowed: 1 to 10"),
    (a_training, {"seed": 2**32}, "Training.seed is 4294967296; allowed: 0 to 4294967295"),
    (
        a_training,
        {"optimizer": Rprop(), "groups": (Group(), Group(weight_decay=0.1))},
        "Group.weight_decay is 0.1; allowed: 0.0 with Rprop, which has none",
    ),
    (
        a_training,
        {"optimizer": Muon()},
        "Training.model has parameters of fewer than two dims; allowed: a model without biases, norms and scale with Muon, which",
    ),
    (
        a_training,
        {"optimizer": Muon(), "model": Model(features=2, layers=(Layer(width=2, bias=False),), scale=True)},
        "Training.model has parameters of fewer than two dims; allowed: a model without biases, norms and scale with Muon, which",
    ),
]

OF_LAYOUTS: list[Invalid] = [
    (Axis, {"name": "dp", "size": 0}, "Axis.size is 0; allowed: 1 to 1048576"),
    (Mesh, {"axes": ()}, "Mesh.axes has 0 axes; allowed: 1 to 3"),
    (Mesh, {"axes": (DP, DP)}, "Mesh.axes has the names ('dp', 'dp'); allowed: distinct ones"),
    (MixedPrecision, {}, "MixedPrecision has no element type; allowed: at least one of param, reduce, output"),
    (
        FSDP1,
        {"mixed_precision": MixedPrecision(output=ElementType.FLOAT16)},
        "FSDP1.mixed_precision is MixedPrecision(output=ElementType.FLOAT16); allowed: one without",
    ),
    (FSDP2, {"gradient_divide_factor": 0.0}, f"FSDP2.gradient_divide_factor is 0.0; {POSITIVE}"),
    (FSDP2, {"layers_per_unit": 2}, "FSDP2.layers_per_unit is 2; allowed: 1, or with Wrapping.PER_LAYER a number of at least 1"),
    (FSDP2, {"layers_per_unit": 0, "wrapping": Wrapping.PER_LAYER}, "FSDP2.layers_per_unit is 0; allowed: 1, or with"),
    (FSDP2, {"reshard_to": 1}, "FSDP2.reshard_to is 1; allowed: None, or with reshard_after_forward a number of at least 2"),
    (FSDP2, {"reshard_to": 2, "reshard_after_forward": False}, "FSDP2.reshard_to is 2; allowed: None, or with reshard"),
    (DDP, {"bucket_cap_mb": 0.0}, f"DDP.bucket_cap_mb is 0.0; {POSITIVE}"),
    (
        DDP,
        {"parameters_as_bucket_view": True},
        "DDP.parameters_as_bucket_view is True; allowed: False without zero_redundancy",
    ),
    (Replicate, {"bucket_cap_mb": 0.0}, f"Replicate.bucket_cap_mb is 0.0; {POSITIVE}"),
    (
        Replicate,
        {"implementation": Replicator.FSDP, "compression": Compression.FP16},
        "Replicate.compression is Compression.FP16; allowed: Compression.NONE with Replicator.FSDP",
    ),
    (
        Replicate,
        {"wrapping": Wrapping.PER_LAYER},
        "Replicate.wrapping is Wrapping.PER_LAYER; allowed: Wrapping.WHOLE with Replicator.DDP",
    ),
    (
        Replicate,
        {"implementation": Replicator.FSDP, "bucket_cap_mb": 1.0},
        "Replicate.bucket_cap_mb is 1.0; allowed: 25.0 with Replicator.FSDP",
    ),
    (Execution, {"per_layer": True}, "Execution.per_layer is True; allowed: False with Compile.NONE"),
    (
        LayerPlan,
        {"output": ActivationSharding.FEATURES},
        "LayerPlan.output is ActivationSharding.FEATURES; allowed with Split.REPLICATED",
    ),
    (
        LayerPlan,
        {"split": Split.OUTSIDE, "output": ActivationSharding.ROWS},
        "LayerPlan.output is ActivationSharding.ROWS; allowed with Split.OUTSIDE: ActivationSharding.WHOLE",
    ),
    (
        TensorParallel,
        {"plan": (LayerPlan(output=ActivationSharding.ROWS), LayerPlan(split=Split.OUTSIDE))},
        "TensorParallel.plan has Split.OUTSIDE after output ActivationSharding.ROWS; allowed: ActivationSharding.WHOLE",
    ),
    (TensorParallel, {"plan": ()}, "TensorParallel.plan has 0 entries; allowed: 1 to 8, one a layer"),
    (
        TensorParallel,
        {"plan": (LayerPlan(split=Split.COLUMN, output=ActivationSharding.FEATURES),)},
        "TensorParallel.plan ends with output ActivationSharding.FEATURES; allowed: ActivationSharding.WHOLE",
    ),
    (Execution, {"whole_step": True, "compile": Compile.INDUCTOR}, "Execution.whole_step is True; allowed: only without compile"),
    (Pipeline, {"num_chunks": 0}, "Pipeline.num_chunks is 0; allowed: 1 to 16"),
    (Pipeline, {"stages_per_rank": 2}, "Pipeline.stages_per_rank is 2; allowed: 1 with PipelineSchedule.GPIPE"),
    (Pipeline, {"schedule": PipelineSchedule.ZBV}, "Pipeline.stages_per_rank is 1; allowed: 2 with PipelineSchedule.ZBV"),
    (Pipeline, {"boundaries": (0,)}, "Pipeline.boundaries is (0,); allowed: rising numbers from 1"),
    (Pipeline, {"boundaries": (2, 2)}, "Pipeline.boundaries is (2, 2); allowed: rising numbers from 1"),
    (a_pipeline, {"parallelisms": (LOOPED,)}, "Pipeline.stages_per_rank is 3; allowed: with 3 ranks at most 2"),
    (
        a_pipeline,
        {"parallelisms": (Pipeline(boundaries=(1,)),)},
        "Pipeline.boundaries is (1,); allowed: () or 2 of them: 3 ranks x 1 stages",
    ),
    (
        a_pipeline,
        {"parallelisms": (Pipeline(schedule=PipelineSchedule.ONE_F_ONE_B, num_chunks=2),)},
        "Pipeline.num_chunks is 2; allowed: what PipelineSchedule.ONE_F_ONE_B can run on 3 ranks",
    ),
    (Layout, {"mesh": MESH, "parallelisms": ()}, "Layout.parallelisms is (); allowed: at least one parallelism"),
    (Layout, {"mesh": MESH, "parallelisms": (DDP(), SPMD())}, "2 parallelisms; allowed: at most one for each of the axes ['dp']"),
    (Layout, {"mesh": HYBRID, "parallelisms": (DDP(),)}, "ddp needs ('dp',)"),
    (Layout, {"mesh": HYBRID, "parallelisms": (FSDP1(),)}, "FSDP1.strategy is ShardingStrategy.FULL_SHARD; allowed: a hybrid"),
    (
        Layout,
        {"mesh": MESH, "parallelisms": (FSDP1(strategy=ShardingStrategy.HYBRID_SHARD),)},
        "FSDP1.strategy is ShardingStrategy.HYBRID_SHARD; allowed: a hybrid one exactly on the axes dp_replicate, dp_shard",
    ),
    (a_scenario, {"schedule_seed": -1}, "Scenario.schedule_seed is -1; allowed: 0 to 4294967295"),
    (Resume, {"layout": LAYOUT, "steps": 0}, "Resume.steps is 0; allowed: at least 1"),
    (a_scenario, {"resume": Resume(layout=LAYOUT)}, "Resume.steps is 1; allowed: fewer than the 1 of the training"),
]

INVALID = OF_TOKEN_MODELS + OF_MODELS + OF_OPTIMIZERS + OF_TRAININGS + OF_LAYOUTS


@pytest.mark.parametrize(("noun", "fields", "words"), INVALID)
def test_what_is_outside_its_range_is_refused(noun: Noun, fields: dict[str, Any], words: str) -> None:
    """The error is one line that says the noun, the field, the value and what is allowed."""
    with pytest.raises(InvalidScenario) as refused:
        noun(**fields)
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("field", "value", "words"), [("lr", 0.0, POSITIVE), ("weight_decay", -0.1, NOT_NEGATIVE)])
def test_every_optimizer_checks_what_all_have(kind: type[Optimizer], field: str, value: float, words: str) -> None:
    """An optimizer with checks of its own makes the common ones too."""
    with pytest.raises(InvalidScenario) as refused:
        kind(**{field: value})
    assert str(refused.value) == f"{kind.__name__}.{field} is {value}; {words}"


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("implementation", Implementation)
def test_only_what_torch_has_on_cpu_is_taken(kind: type[Optimizer], implementation: Implementation) -> None:
    """An optimizer refuses an implementation that torch lacks, and lists what it has."""
    if implementation in kind.implementations():
        assert kind(implementation=implementation).implementation is implementation
    else:
        with pytest.raises(InvalidScenario, match=r"allowed: Implementation\.FOR_LOOP"):
            kind(implementation=implementation)


@pytest.mark.parametrize(
    ("noun", "fields"),
    [
        (RMSprop, {"alpha": 0.0}),
        (RMSprop, {"alpha": 1.0}),
        (RMSprop, {"alpha": 0.5, "centered": True}),
        (a_training, {"optimizer": Rprop(), "groups": (Group(lr_factor=2.0),)}),
        (a_training, {"optimizer": SGD(), "groups": (Group(weight_decay=0.1),)}),
    ],
)
def test_what_goes_together_is_taken(noun: Noun, fields: dict[str, Any]) -> None:
    """A value that is refused only beside another one is taken without it."""
    taken = noun(**fields)
    assert {name: getattr(taken, name) for name in fields} == fields


def test_every_check_is_tried() -> None:
    """Every noun with a check has an invalid value in the tables above."""
    checked = {
        name
        for name, noun in vars(nouns).items()
        if inspect.isclass(noun) and "__post_init__" in vars(noun) and noun not in (Optimizer, nouns.PlannedParallelism)
    }
    tried = {getattr(noun, "func", noun).__name__ for noun, _, _ in INVALID}
    assert checked - tried == set()


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (3, 1, 2)])
def test_a_coordinate_is_row_major(shape: tuple[int, ...]) -> None:
    """The last axis is that of neighbours, as in an array of that shape."""
    mesh = Mesh(axes=tuple(Axis(name=f"axis{index}", size=size) for index, size in enumerate(shape)))
    assert [mesh.coordinate(rank) for rank in range(mesh.num_ranks)] == list(np.ndindex(*shape))


def test_a_layout_is_asked_for_its_parallelisms() -> None:
    """By kind, innermost first; several kinds at once."""
    parallelisms = (nouns.TensorParallel(), nouns.FSDP2())
    layout = nouns.Layout(mesh=Mesh(axes=(Axis(name="dp", size=1), Axis(name="tp", size=1))), parallelisms=parallelisms)
    assert layout.of(nouns.FSDP2) == parallelisms[1:]
    assert layout.of(nouns.FSDP2, nouns.TensorParallel) == parallelisms
    assert layout.has(nouns.DDP, nouns.FSDP2)
    assert not layout.has(nouns.DDP)
