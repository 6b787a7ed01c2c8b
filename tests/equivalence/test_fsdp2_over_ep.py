"""`fully_shard` over `dp` x `ep` for parameters outside experts, and over `dp` for experts, as in torchtitan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from equivcheck import Scenario, check
from equivcheck.diagnosis.explain import explained
from equivcheck.export.script import script_of
from equivcheck.layouts.base.script.draft import CannotExport
from equivcheck.layouts.composition.fitting import fit_scenario
from equivcheck.layouts.composition.limits import limit_reason, repair_layout
from equivcheck.layouts.parallelisms.fsdp2.known import divided_apart_on_one_shard, one_element_of_head_norm
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.known_issues.workarounds import divided_by_ranks
from equivcheck.report.finding_page.mesh import placements
from equivcheck.scenario import (
    FSDP2,
    Adam,
    Axis,
    ClipNorm,
    ClipValue,
    Data,
    ExpertParallel,
    Experts,
    ExpertStorage,
    GatedMLP,
    Head,
    Layer,
    Layout,
    LocalTensorParallel,
    Loss,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    Precision,
    Resume,
    Tokens,
    Training,
    Wrapping,
)
from support.exported import run_script
from support.verdicts import require_predicted

OVER_EP = FSDP2(shard_over_ep=True, sum_reductions=True)
UNITS = replace(OVER_EP, wrapping=Wrapping.PER_LAYER)
TWO_STAGES = Pipeline(num_chunks=2, boundaries=(2,))
EXPERTS = ExpertParallel(storage=ExpertStorage.DTENSOR)
TRAINING = Training(
    model=Model(features=3, length=2, layers=(Layer(width=3), Experts(hidden=3, num_experts=4, shared=True), Layer(width=2))),
    data=Data(microbatches=(8, 8)),
    optimizer=Adam(),
    clipping=ClipNorm(max_norm=0.1),
    steps=2,
)


def layout(fsdp: FSDP2, *inside: Parallelism, **sizes: int) -> Layout:
    """Expert parallelism, then perhaps a pipeline, then FSDP2."""
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()))
    return Layout(mesh=mesh, parallelisms=(EXPERTS, *inside, fsdp))


def scenario(fsdp: FSDP2, *inside: Parallelism, training: Training = TRAINING, **sizes: int) -> Scenario:
    """The training on a mesh with these axes."""
    return Scenario(training=training, layout=layout(fsdp, *inside, **sizes))


@pytest.mark.parametrize("fsdp", [OVER_EP, UNITS, replace(UNITS, gradient_divide_factor=3.0)], ids=["root", "layers", "divided"])
@pytest.mark.parametrize(
    "sizes",
    [{"dp": 2, "ep": 2}, {"dp": 2, "ep": 1}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}],
    ids=lambda sizes: "x".join(map(str, sizes.values())),
)
@pytest.mark.parametrize("loss", [Loss.MSE_SUM, Loss.MSE_MEAN])
def test_experts_and_other_parameters_have_their_own_shards(fsdp: FSDP2, sizes: dict[str, int], loss: Loss) -> None:
    """Shards may be uneven or empty. All calls are predicted."""
    training = replace(TRAINING, loss=loss)
    require_predicted(scenario(fsdp, training=training, **sizes))
    in_float32 = replace(training, precision=Precision.FLOAT32, clipping=ClipValue(clip_value=0.01))
    check(scenario(fsdp, training=in_float32, **sizes)).assert_no_finding()


@pytest.mark.parametrize(
    "changes",
    [
        {"reshard_after_forward": False},
        {"reshard_after_backward": False, "no_sync": True},
        {"explicit_prefetch": True},
        {"explicit_unshard": True, "cpu_offload": True},
        {"ignore_frozen": True},
        {"shard_last_dim": True},
    ],
    ids=" ".join,
)
def test_options_know_both_meshes(changes: dict[str, object]) -> None:
    """Experts are gathered over `dp`, and other parameters over all ranks. Two of four layers are frozen."""
    frozen = (GatedMLP(hidden=8, frozen=True), Experts(hidden=8, num_experts=4, frozen=True))
    model = Model(features=8, length=2, layers=(*frozen, GatedMLP(hidden=8), Experts(hidden=8, num_experts=4)))
    fsdp = replace(UNITS, **changes)  # type: ignore[arg-type]
    require_predicted(scenario(fsdp, training=replace(TRAINING, model=model), dp=2, ep=4))


def test_no_gradient_is_reduced_twice() -> None:
    """One reduce-scatter over all ranks, one over `dp` for the experts, and no explicit all-reduce over `ep`."""
    model = Model(features=2, length=2, layers=(Experts(hidden=2),))
    training = replace(TRAINING, model=model, clipping=None, data=Data(microbatches=(8,)), steps=1)
    calls = require_predicted(scenario(OVER_EP, training=training, dp=2, ep=2)).calls[0]
    reduced = [(call.op.partition(".")[0], call.ranks) for call in calls if "reduce" in call.op]
    assert sorted(reduced) == [("reduce_scatter", (0, 1, 2, 3)), ("reduce_scatter", (0, 2))]


STAGES = scenario(UNITS, TWO_STAGES, dp=2, pp=2, ep=2)


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
def test_stages_have_both_meshes() -> None:
    """The mesh of a stage leaves `pp` out, which lies between `dp` and `ep`."""
    check(STAGES).assert_equivalent()


@pytest.mark.parametrize("is_over_ep", [True, False])
def test_scripts_with_a_pipeline_refuse_dtensor_experts(is_over_ep: bool) -> None:
    """They have no units of experts, so nothing would divide the gradients of experts by the number of `ep` ranks."""
    training = replace(TRAINING, clipping=None)
    with pytest.raises(CannotExport, match="units of experts"):
        script_of(scenario(FSDP2(shard_over_ep=is_over_ep), TWO_STAGES, training=training, dp=1, pp=2, ep=2))


@pytest.mark.parametrize("dp", [2, 3])
def test_shards_follow_the_order_of_the_mesh(dp: int) -> None:
    """On a mesh with `ep` outside, as on any other, consecutive ranks have consecutive shards."""
    model = Model(features=6, layers=(Layer(width=5),))
    training = replace(TRAINING, model=model, data=Data(microbatches=(12,)))
    require_predicted(scenario(OVER_EP, training=training, ep=2, dp=dp))


def test_pages_name_both_axes() -> None:
    """Experts are sharded by two parallelisms, and other parameters by one over both axes."""
    chosen = scenario(OVER_EP, dp=2, ep=2)
    by = {row.name: row.by for row in placements(chosen.layout, TRAINING.model, {})}
    assert by["layers.1.experts.gate"] == ("sharded on dim 0", "sharded on dim 0")
    assert by["layers.1.shared.gate"] == ("sharded on dim 0 over dp x ep", "replicated")


@pytest.mark.parametrize(("saved", "loaded"), [(OVER_EP, FSDP2(sum_reductions=True)), (FSDP2(sum_reductions=True), UNITS)])
def test_a_training_resumes_on_other_meshes(saved: FSDP2, loaded: FSDP2) -> None:
    """A checkpoint has the full tensors, whatever their mesh."""
    resumed = replace(scenario(saved, dp=2, ep=2), resume=Resume(layout=layout(loaded, dp=4, ep=1)))
    check(resumed).assert_equivalent()


@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 2}, {"dp_replicate": 1, "dp_shard": 2, "ep": 2}], ids=["fsdp", "hsdp"])
def test_the_exported_script_has_both_meshes(sizes: dict[str, int], tmp_path: Path) -> None:
    """It does not reduce gradients explicitly."""
    script, _ = run_script(scenario(UNITS, **sizes), tmp_path)
    assert "mesh=flattened" in script
    assert "reduce_gradients" not in script


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 2, "ep": 4}, "over the 2 dp ranks, but not over the 4 ep ranks"),
        ({"dp": 1, "ep": 2}, "unreduced over the 2 ep ranks"),
    ],
    ids=["2x4", "1x2"],
)
def test_gradients_not_reduced_over_ep_are_explained(sizes: dict[str, int], words: str) -> None:
    """The explanation names `ep`, over which `fully_shard` must reduce, too."""
    plant = mutant("gradients_not_reduced_over_ep").plant
    # Without experts, because torch divides their float64 gradients twice if `dp` has one rank.
    model = Model(features=3, layers=(Layer(width=8), Layer(width=8)))
    training = replace(TRAINING, model=model, clipping=None, data=Data(microbatches=(8,)), steps=1)
    chosen = scenario(OVER_EP, training=training, **sizes)
    diagnosis = explained(check(chosen, alter=plant), alter=plant).diagnosis
    assert diagnosis is not None
    assert words in diagnosis.sentence


@pytest.mark.torch(">=2.10", "stages of torch 2.9 cannot exchange messages over gloo")
@pytest.mark.parametrize("fsdp", [OVER_EP, UNITS], ids=["root", "layers"])
def test_gradients_of_stages_not_reduced_over_ep_are_explained(fsdp: FSDP2) -> None:
    """The mutant reaches whole stages, too, which are outside the model."""
    plant = mutant("gradients_not_reduced_over_ep").plant
    chosen = scenario(fsdp, TWO_STAGES, training=replace(TRAINING, clipping=None), dp=2, pp=2, ep=2)
    diagnosis = explained(check(chosen, alter=plant), alter=plant).diagnosis
    assert diagnosis is not None
    assert diagnosis.sentence.endswith("over the 2 dp ranks, but not over the 2 ep ranks")


@pytest.mark.parametrize("name", ["router_gradient_of_own_rows", "only_experts_reduced"])
def test_mutants_of_explicit_reductions_need_them(name: str) -> None:
    """There are none to leave out with the option."""
    assert mutant(name).applies(scenario(replace(OVER_EP, shard_over_ep=False), dp=2, ep=2))
    assert not mutant(name).applies(scenario(OVER_EP, dp=2, ep=2))


def test_a_known_issue_of_expert_units_can_be_avoided() -> None:
    """Without units of experts, nothing is divided twice on one shard. They are needed only for the option."""
    known = scenario(OVER_EP, dp=1, ep=2)
    assert divided_apart_on_one_shard(known)
    avoided = fit_scenario(divided_by_ranks(known))
    assert avoided is not None
    assert not divided_apart_on_one_shard(avoided)


@pytest.mark.parametrize("is_over_ep", [True, False])
def test_shards_of_a_head_are_counted_over_ep(is_over_ep: bool) -> None:
    """The norm's four weights are one element a rank over `dp_shard` x `ep`, and two over `dp_shard`."""
    model = Model(features=4, length=2, source=Tokens(vocabulary=4), layers=(Layer(width=4),), head=Head(norm=Norm.RMS))
    fsdp = replace(OVER_EP, shard_over_ep=is_over_ep)
    chosen = scenario(fsdp, training=replace(TRAINING, model=model), dp_replicate=2, dp_shard=2, ep=2)
    assert one_element_of_head_norm(chosen) is is_over_ep


def test_plain_experts_become_dtensors() -> None:
    """`fully_shard` needs DTensors to know that ranks have other experts."""
    plain = replace(layout(OVER_EP, dp=2, ep=2), parallelisms=(ExpertParallel(), OVER_EP))
    assert "experts as plain tensors" in (limit_reason(TRAINING, plain) or "")
    assert repair_layout(plain).parallelisms == (EXPERTS, OVER_EP)


def test_the_option_is_dropped_next_to_local_tensor_parallelism() -> None:
    """`local_tensor_parallel` needs plain tensors."""
    mesh = Mesh(axes=tuple(Axis(name=name, size=2) for name in ("dp", "ep", "tp")))
    shared = Layout(mesh=mesh, parallelisms=(LocalTensorParallel(), ExpertParallel(), OVER_EP))
    assert repair_layout(shared).of(FSDP2) == (replace(OVER_EP, shard_over_ep=False),)
