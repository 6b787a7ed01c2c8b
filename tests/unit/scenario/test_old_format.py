"""Tests that scenarios in format 1 keep their meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equivcheck.errors import InvalidScenario
from equivcheck.scenario import (
    FSDP2,
    ActivationSharding,
    AdamW,
    AuxiliaryLinear,
    Axis,
    Checkpointing,
    ClipNorm,
    CosineAnnealingLR,
    Data,
    ElementType,
    Execution,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    MixedPrecision,
    Model,
    Norm,
    NormType,
    ParameterGroup,
    ParameterSelection,
    Pipeline,
    PipelineSchedule,
    Precision,
    Resume,
    Scenario,
    ShapeOp,
    Split,
    TensorParallel,
    Training,
    ZeroGrad,
)
from equivcheck.scenario.file_format.codec import from_json, to_json
from equivcheck.scenario.layers.base import Activation

FILES = sorted((Path(__file__).parent / "format_1").glob("*.json"))

EVERYTHING = Scenario(
    training=Training(
        model=Model(
            features=4,
            layers=(
                Layer(width=4, norm=Norm.RMS, auxiliary=AuxiliaryLinear.EVEN_STEPS, shape_op=ShapeOp.VIEW, dropout=0.5),
                Layer(width=4, residual=True, frozen=True, auxiliary=AuxiliaryLinear.NEVER),
                Layer(width=4, shares=1, activation=Activation.GELU),
            ),
            counter=True,
            offset=True,
        ),
        data=Data(microbatches=(4, 2), batch_dim=1),
        optimizer=AdamW(betas=(0.8, 0.9)),
        loss=Loss.LINEAR_SUM,
        groups=(ParameterGroup(select=ParameterSelection.ODD_LAYERS, weight_decay=0.1),),
        schedule=CosineAnnealingLR(T_max=3),
        clipping=ClipNorm(norm_type=NormType.INF),
        zero_grad=ZeroGrad.ZERO,
        precision=Precision.FLOAT32,
        steps=3,
        seed=7,
    ),
    layout=Layout(
        mesh=Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2))),
        parallelisms=(
            TensorParallel(
                plan=(
                    LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES),
                    LayerPlan(split=Split.ROWWISE, output=ActivationSharding.ROWS),
                    LayerPlan(),
                )
            ),
            FSDP2(mixed_precision=MixedPrecision(param=ElementType.BFLOAT16)),
        ),
        execution=Execution(checkpointing=Checkpointing.EVERY_LAYER),
    ),
    schedule_seed=5,
    resume=Resume(
        layout=Layout(
            mesh=Mesh(axes=(Axis(name="pp", size=2),)),
            parallelisms=(Pipeline(schedule=PipelineSchedule.ONE_F_ONE_B, num_chunks=2, boundaries=(2,)),),
        ),
        steps=2,
        flatten_optimizer_state_dict=True,
    ),
)
"""Scenario in `format_1/everything.json`: every renamed field, and every object without ``kind``, has another value than its
default."""


def everything() -> dict[str, Any]:
    """Content of the file."""
    data: dict[str, Any] = json.loads((Path(__file__).parent / "format_1" / "everything.json").read_text())
    return data


def test_a_scenario_of_format_1_is_read_with_every_field() -> None:
    """Renamed fields and objects without ``kind`` keep their meaning."""
    assert from_json(json.dumps(everything())) == EVERYTHING


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_read_from_format_1_is_written_in_the_current_one(file: Path) -> None:
    """Old findings and scripts are rewritten without loss."""
    scenario = from_json(file.read_text())
    written = to_json(scenario)
    assert json.loads(written)["format"] == 2
    assert from_json(written) == scenario


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (
            ("training", "model", "layers", 0, "width"),
            "2",
            'training.model.layers[0].width: "2" is not valid: it is a string. Expected an',
        ),
        (("training", "model", "layers", 0), [], "training.model.layers[0]: [] is not valid: it is a list. Expected an object"),
        (("training", "model", "layers"), 3, "training.model.layers: 3 is not valid: it is an integer. Expected a list"),
        (("training", "model"), None, "training.model: null is not valid. Expected an object"),
        (("training", "loss"), "huber", 'training.loss.kind: "huber" is not valid. Expected one of: mse_mean'),
        (("training", "stairs"), 1, "training.stairs: unknown field. Expected one of: model, data"),
        (("start", "steps"), 9, "Resume.steps 9 is not valid. Expected fewer steps than the training's 3"),
    ],
)
def test_what_does_not_fit_format_1_is_refused_by_its_place(path: tuple[str | int, ...], value: Any, problem: str) -> None:
    """Errors in old files have the same form."""
    data = everything()
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InvalidScenario) as raised:
        from_json(json.dumps(data), where="old.json")
    assert str(raised.value).startswith(f"old.json: {problem}")
