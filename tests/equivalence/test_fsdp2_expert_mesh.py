"""Experts that `fully_shard` shards over all ranks, on a mesh of their own, next to parameters with replicas."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import Scenario, check
from equivcheck.diagnosis.explain import explained
from equivcheck.layouts.composition.limits import limit_reason, repair_layout
from equivcheck.mutants.registry import mutant
from equivcheck.report.finding_page.mesh import placements
from equivcheck.scenario import (
    ASGD,
    FSDP2,
    Adam,
    Axis,
    ClipNorm,
    ClipValue,
    Data,
    Experts,
    Implementation,
    Layer,
    Layout,
    Loss,
    Mesh,
    Model,
    Precision,
    Resume,
    Training,
    Wrapping,
)
from equivcheck.scenario.mesh import REPLICATE, SHARD
from support.exported import run_script
from support.verdicts import require_predicted

pytestmark = pytest.mark.torch(">=2.12", "earlier versions give no parameter another mesh")

EXPERTS = FSDP2(experts_on_all_ranks=True)
UNITS = replace(EXPERTS, wrapping=Wrapping.PER_LAYER)
ROUTED = Experts(hidden=3, num_experts=3, shared=True)
TRAINING = Training(
    model=Model(features=3, length=2, layers=(Layer(width=3), ROUTED, Layer(width=2), Experts(hidden=2))),
    data=Data(microbatches=(8, 8)),
    optimizer=Adam(),
    clipping=ClipNorm(max_norm=0.1),
    steps=2,
)


def scenario(fsdp: FSDP2, *sizes: int, **changes: object) -> Scenario:
    """Two layers of experts on replicas and shards."""
    axes = tuple(Axis(name=name, size=size) for name, size in zip((REPLICATE, SHARD), sizes, strict=True))
    return Scenario(training=replace(TRAINING, **changes), layout=Layout(mesh=Mesh(axes=axes), parallelisms=(fsdp,)))  # type: ignore[arg-type]


def test_layouts_without_a_mesh_for_experts_import_nothing_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`expert_mesh` imports names that torch before 2.12 lacks, and FSDP2 layouts must run there."""
    monkeypatch.setitem(sys.modules, "equivcheck.layouts.parallelisms.fsdp2.expert_mesh", None)
    check(scenario(FSDP2(), 1, 2)).assert_equivalent()


@pytest.mark.parametrize("fsdp", [EXPERTS, UNITS, replace(UNITS, layers_per_unit=2)], ids=["root", "layers", "pairs"])
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("loss", [Loss.MSE_SUM, Loss.MSE_MEAN])
def test_experts_on_all_ranks_train_like_replicas(fsdp: FSDP2, sizes: tuple[int, ...], loss: Loss) -> None:
    """Shards of experts may be uneven or empty. All calls are predicted."""
    require_predicted(scenario(fsdp, *sizes, loss=loss))
    require_predicted(scenario(fsdp, *sizes, loss=loss, precision=Precision.FLOAT32, clipping=ClipValue(clip_value=0.01)))


@pytest.mark.parametrize(
    "changes",
    [
        {"reshard_after_forward": False},
        {"reshard_to": 2},
        {"reshard_after_backward": False, "no_sync": True},
        {"explicit_prefetch": True, "all_reduce_once": True},
        {"explicit_unshard": True, "cpu_offload": True},
        {"gradient_divide_factor": 3.0, "sum_reductions": True},
        {"ignore_frozen": True},
        {"shard_last_dim": True},
        {"shard_largest_dim": True},
    ],
    ids=" ".join,
)
def test_options_know_the_mesh_of_experts(changes: dict[str, object]) -> None:
    """Units are gathered, resharded and reduced over all ranks if they hold experts. Two of four layers are frozen."""
    layers = (Layer(width=8, frozen=True), Experts(hidden=8, frozen=True), Layer(width=8), Experts(hidden=8))
    model = Model(features=8, length=2, layers=layers)
    require_predicted(scenario(replace(UNITS, **changes), 2, 4, model=model))  # type: ignore[arg-type]


def test_gradients_of_experts_are_reduced_once() -> None:
    """One reduce-scatter over all ranks for the experts of a layer, and two reductions for its other parameters."""
    model = Model(features=2, length=2, layers=(Experts(hidden=2),))
    calls = require_predicted(scenario(EXPERTS, 2, 2, model=model, clipping=None, data=Data(microbatches=(8,)), steps=1)).calls[0]
    reduced = [(call.op.partition(".")[0], len(call.ranks)) for call in calls if not call.op.startswith("all_gather")]
    assert sorted(reduced) == [("all_reduce", 2), ("reduce_scatter", 2), ("reduce_scatter", 4)]


def test_experts_are_held_by_one_rank_each() -> None:
    """The finding page names both axes for experts, and other parameters have replicas."""
    chosen = scenario(EXPERTS, 2, 2)
    by = {row.name: row.by for row in placements(chosen.layout, chosen.training.model, {})}
    assert by["layers.1.experts.gate"] == ("sharded on dim 0 over dp_replicate x dp_shard",)
    assert by["layers.1.shared.gate"] == ("sharded on dim 0",)


@pytest.mark.parametrize(("saved", "loaded"), [(EXPERTS, FSDP2()), (FSDP2(), UNITS), (UNITS, EXPERTS)])
def test_a_training_resumes_with_experts_on_another_mesh(saved: FSDP2, loaded: FSDP2) -> None:
    """A checkpoint has the full tensors, whatever their mesh."""
    before, after = scenario(saved, 2, 2), scenario(loaded, 1, 2)
    resumed = replace(before, resume=Resume(layout=after.layout))
    check(resumed).assert_equivalent()


@pytest.mark.parametrize("fsdp", [UNITS, replace(EXPERTS, shard_last_dim=True)], ids=["units", "last_dim"])
def test_the_exported_script_gives_experts_a_mesh(fsdp: FSDP2, tmp_path: Path) -> None:
    """It clips by the norm over both meshes."""
    model = replace(TRAINING.model, features=4, layers=(Layer(width=4), Experts(hidden=4)))
    script, _ = run_script(scenario(fsdp, 2, 1, model=model), tmp_path)
    assert "ShardPlacementResult(shard(parameter), all_ranks)" in script


def test_the_exported_script_gives_every_class_of_experts_a_mesh(tmp_path: Path) -> None:
    """Layers with other options have classes of their own. Parameters of all those lie on the mesh with all ranks."""
    model = replace(TRAINING.model, layers=(Experts(hidden=2), ROUTED))
    script, _ = run_script(scenario(EXPERTS, 2, 1, model=model), tmp_path)
    assert "class Experts2" in script
    assert 'hasattr(layer, "experts")' in script


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("expert_gradients_not_reduced_over_replicas", "over the 4 dp_shard ranks, but not over the 2 dp_replicate ranks"),
        ("expert_gradients_divided_by_shards_only", "over the 2 dp_replicate ranks, not the mean"),
    ],
)
def test_wrong_reductions_of_experts_are_explained(name: str, words: str) -> None:
    """The explanation names the replicas, and only parameters of experts."""
    plant = mutant(name).plant
    model = Model(features=3, length=2, layers=(Layer(width=3), ROUTED))
    chosen = scenario(EXPERTS, 2, 4, model=model, clipping=None, data=Data(microbatches=(8,)), steps=1)
    diagnosis = explained(check(chosen, alter=plant), alter=plant).diagnosis
    assert diagnosis is not None
    named = "the gradients of `layers.1.experts.gate`, `layers.1.experts.up` and `layers.1.experts.down` are"
    assert diagnosis.exact
    assert diagnosis.sentence.startswith(named)
    assert diagnosis.sentence.endswith(words)


def test_asgd_of_two_meshes_loops() -> None:
    """Foreach ASGD refuses DTensors of two meshes; a loop does not."""
    looping = ASGD(implementation=Implementation.FOR_LOOP)
    require_predicted(scenario(EXPERTS, 2, 2, optimizer=looping))
    foreach = scenario(EXPERTS, 2, 2, optimizer=ASGD(implementation=Implementation.FOREACH))
    assert "two meshes" in (limit_reason(foreach.training, foreach.layout) or "")


def test_a_layout_that_cannot_have_two_groups_gives_experts_no_mesh() -> None:
    """Modules with two parameter groups refuse hooks."""
    layout = scenario(replace(EXPERTS, replica_hook=True), 2, 2).layout
    assert repair_layout(layout).of(FSDP2) == (FSDP2(replica_hook=True),)
