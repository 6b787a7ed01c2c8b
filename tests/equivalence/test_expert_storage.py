"""Experts kept as DTensors: alone and inside each data parallelism, read, clipped, updated and saved as whole tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from equivcheck import Outcome, check
from equivcheck.layouts.base.expected_calls.torch_versions import FREED_WHILE_RECOMPUTED
from equivcheck.layouts.composition.fitting import fit_scenario
from equivcheck.layouts.composition.limits import repair_training, why_unsupported
from equivcheck.mutants.experts.exchange import EXPERT_PARALLEL
from equivcheck.mutants.registry import mutant, mutants
from equivcheck.scenario import (
    ASGD,
    DDP,
    FSDP2,
    Adafactor,
    AdamW,
    Axis,
    Checkpointing,
    ClipNorm,
    Data,
    Execution,
    ExpertParallel,
    Experts,
    ExpertStorage,
    Implementation,
    Layer,
    Layout,
    LocalDataParallel,
    Mesh,
    Model,
    Norm,
    NormType,
    Parallelism,
    Precision,
    Replicate,
    Replicator,
    Resume,
    Scenario,
    Training,
    Wrapping,
)
from equivcheck.system.torch_version import is_torch_in
from support.exported import run_script
from support.supported import require_mended, require_supported
from support.verdicts import require_predicted

EXPERTS = Experts(hidden=3, num_experts=4, top_k=2, normalised=True, bias=True, norm=Norm.RMS, shared=True)
STORED = ExpertParallel(storage=ExpertStorage.DTENSOR)
SUMS = FSDP2(sum_reductions=True)
BY_LAYERS = replace(SUMS, wrapping=Wrapping.PER_LAYER)
AROUND: dict[str, tuple[Parallelism, ...]] = {
    "alone": (),
    "local_data_parallel": (LocalDataParallel(flat_buffer=True),),
    "ddp": (DDP(bucket_cap_mb=1e-4),),
    "ddp, updates shared": (DDP(no_sync=True, zero_redundancy=True),),
    "replicate": (Replicate(),),
    "replicate by fsdp": (Replicate(implementation=Replicator.FSDP, wrapping=Wrapping.PER_LAYER),),
    "fsdp2": (SUMS,),
    "fsdp2 by layers": (replace(BY_LAYERS, gradient_divide_factor=3.0),),
    "fsdp2 by two layers": (replace(BY_LAYERS, layers_per_unit=2, explicit_prefetch=True, no_sync=True),),
    "fsdp2 along the last dim": (replace(SUMS, shard_last_dim=True, reshard_after_forward=False),),
}
"""What is around experts."""


def a_scenario(*around: Parallelism, layer: Experts = EXPERTS, ranks: int = 2, **execution: object) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped by norm, of a model that begins with a layer that is frozen."""
    layers = (Layer(width=4, frozen=True), layer, layer)
    training = Training(
        model=Model(features=4, layers=layers),
        data=Data(microbatches=(12, 24)),
        optimizer=AdamW(),
        clipping=ClipNorm(max_norm=0.05),
        steps=2,
    )
    axes = (*(Axis(name="dp", size=2),) * len(around), Axis(name="ep", size=ranks))
    layout = Layout(
        mesh=Mesh(axes=axes),
        parallelisms=(STORED, *around),
        execution=Execution(**execution),  # type: ignore[arg-type]
    )
    return Scenario(training=repair_training(training, layout), layout=layout)


@pytest.mark.parametrize(("num_experts", "ranks"), [(2, 1), (3, 2), (5, 3), (2, 4)])
def test_uneven_experts_and_ranks_without_any_equal_one_device(num_experts: int, ranks: int) -> None:
    """Shards of a DTensor may be unequal or empty: a rank without experts takes part in every call."""
    scenario = a_scenario(ranks=ranks, layer=replace(EXPERTS, num_experts=num_experts))
    assert scenario.training.model.layers[1].num_experts == num_experts
    require_mended(check(scenario))
    require_predicted(scenario)


@pytest.mark.parametrize("around", AROUND)
def test_data_parallelism_around_it(around: str) -> None:
    """Rows over both axes, and experts over one; the one of two layers that is computed again finds its experts."""
    scenario = a_scenario(*AROUND[around], checkpointing=Checkpointing.ODD_LAYERS)
    require_supported(scenario)
    verdict = check(scenario)
    verdict.assert_equivalent()
    assert bool(verdict.unmodelled) is (around.startswith("fsdp2") and is_torch_in(FREED_WHILE_RECOMPUTED))


@pytest.mark.parametrize("around", ["ddp", "fsdp2 by layers"])
def test_unequally_many_experts_inside_data_parallelism(around: str) -> None:
    """Five over three ranks, which DTensors of two axes cut once more."""
    require_predicted(a_scenario(*AROUND[around], ranks=3, layer=replace(EXPERTS, num_experts=5)))


def test_shards_of_replicas_around_it() -> None:
    """Eight ranks on three axes: units of experts are divided by all of them."""
    scenario = a_scenario(replace(BY_LAYERS, all_reduce_once=True))
    axes = tuple(Axis(name=name, size=2) for name in ("dp_replicate", "dp_shard", "ep"))
    layout = replace(scenario.layout, mesh=Mesh(axes=axes))
    require_predicted(replace(scenario, layout=layout, training=repair_training(scenario.training, layout)))


def test_sums_are_divided_apart_where_the_backend_divides_by_other_ranks() -> None:
    """Gloo has no premultiplied sum: such a layout is refused, and the nearest one sums first, also in float32."""
    averages = a_scenario(FSDP2())
    assert "premultiplied sum" in (why_unsupported(averages) or "")
    nearest = fit_scenario(replace(averages, training=replace(averages.training, precision=Precision.FLOAT32)))
    assert nearest.layout.of(FSDP2) == (SUMS,)
    require_predicted(nearest)


@pytest.mark.parametrize(("around", "norm_type"), [("alone", NormType.INF), ("fsdp2", NormType.ONE)])
def test_a_norm_is_over_plain_tensors_and_dtensors(around: str, norm_type: NormType) -> None:
    """Of each mesh by itself, and then of these."""
    scenario = a_scenario(*AROUND[around])
    clipping = ClipNorm(max_norm=0.05, norm_type=norm_type)
    require_predicted(replace(scenario, training=replace(scenario.training, clipping=clipping)))


def test_plain_tensors_beside_dtensors_are_updated_one_by_one() -> None:
    """Foreach refuses the mixture; inside `fully_shard` all are DTensors, of which ASGD alone combines those of two meshes."""
    foreach = AdamW(implementation=Implementation.FOREACH)
    alone, sharded = (a_scenario(*AROUND[around]) for around in ("alone", "fsdp2"))
    assert "foreach and fused" in (why_unsupported(replace(alone, training=replace(alone.training, optimizer=foreach))) or "")
    require_predicted(replace(sharded, training=replace(sharded.training, optimizer=foreach)))
    averaged = replace(sharded.training, optimizer=ASGD(implementation=Implementation.FOREACH))
    assert "ASGD refuses" in (why_unsupported(replace(sharded, training=averaged)) or "")


@pytest.mark.parametrize(("first", "second"), [("alone", "fsdp2"), ("fsdp2 by layers", "local_data_parallel")])
def test_a_checkpoint_has_whole_experts(first: str, second: str) -> None:
    """DTensors know of what they are parts, so that a training goes on where experts lie otherwise."""
    scenario, before = a_scenario(*AROUND[second]), a_scenario(*AROUND[first])
    check(replace(scenario, resume=Resume(layout=before.layout, steps=1))).assert_equivalent()
    plain = replace(before.layout, parallelisms=(ExpertParallel(), *AROUND[first]))
    refused = replace(scenario, resume=Resume(layout=plain, steps=1))
    assert "plain tensors" in (why_unsupported(refused) or "")


@pytest.mark.parametrize(
    "around",
    ["alone", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fsdp2 by layers", "local_data_parallel", "ddp"))],
)
def test_a_script_computes_what_ranks_compute(around: str, tmp_path: Path) -> None:
    """A script of torch alone keeps experts as DTensors, and divides them as ranks do."""
    scenario = a_scenario(*AROUND[around])
    script, differences = run_script(scenario, tmp_path)
    assert any("experts.gate" in place for place in differences)
    assert "distribute_tensor" in script


def test_a_script_computes_unlike_experts(tmp_path: Path) -> None:
    """Experts with and without biases have classes and functions of their own."""
    model = Model(features=4, layers=(EXPERTS, replace(EXPERTS, bias=False)))
    scenario = a_scenario()
    scenario = replace(scenario, training=replace(scenario.training, model=model))
    script, _ = run_script(scenario, tmp_path)
    assert "self.experts = Units2()" in script


PAIR = Experts(hidden=2)
FROZEN = Experts(hidden=2, frozen=True)


def _ending(around: str, sizes: tuple[int, int], layer: Experts, norm_type: NormType = NormType.TWO) -> str:
    """The issue on file as which a step of one layer of experts ends, clipped by a norm; empty where it is right."""
    axes = tuple(Axis(name=name, size=size) for name, size in zip(("dp", "ep"), sizes, strict=True))
    layout = Layout(mesh=Mesh(axes=axes[-1 - len(AROUND[around]) :]), parallelisms=(STORED, *AROUND[around]))
    model = Model(features=4, layers=(layer, Layer(width=4)))
    training = Training(model=model, data=Data(microbatches=(12,)), clipping=ClipNorm(norm_type=norm_type))
    verdict = check(Scenario(training=training, layout=layout))
    assert verdict.outcome is (Outcome.KNOWN if verdict.known else Outcome.EQUIVALENT), verdict.reason
    return verdict.known


@pytest.mark.torch(">=2.12", "earlier versions do not come as far")
def test_an_infinity_norm_stumbles_over_ranks_without_experts() -> None:
    """As over any empty shard of a DTensor."""
    assert _ending("alone", (1, 3), PAIR, NormType.INF) == "inf_norm_of_empty_shard"
    assert not _ending("alone", (1, 2), PAIR, NormType.INF)


def test_local_tensors_of_frozen_experts_are_trained() -> None:
    """As of any DTensors inside `DistributedDataParallel`; `fully_shard` leaves them frozen."""
    assert _ending("ddp", (1, 2), FROZEN) == "local_tensors_unfreeze"
    assert not _ending("fsdp2 by layers", (2, 2), FROZEN)


def test_frozen_experts_that_are_trained_may_have_no_elements_for_adafactor() -> None:
    """Two experts over three ranks: the last divides by the number of elements that it has none of, as on file."""
    case = a_scenario(DDP(), ranks=3)
    model = Model(features=4, layers=(Layer(width=4), Experts(hidden=1, num_experts=2, frozen=True)))
    training = replace(case.training, model=model, optimizer=Adafactor())
    assert check(replace(case, training=training)).known == "adafactor_of_nothing"


@pytest.mark.torch(">=2.10", "earlier versions divide once")
def test_units_of_experts_over_one_shard_are_divided_twice() -> None:
    """As any unit with a divide factor that sums."""
    assert _ending("fsdp2", (1, 2), PAIR) == "fsdp2_one_shard_divided_twice"
    assert not _ending("fsdp2", (2, 2), PAIR)


IN_COMPOSITIONS = [name for name in mutants() if mutant(name).layouts == EXPERT_PARALLEL and mutant(name).minimum.ranks == 2]


@pytest.mark.parametrize(
    ("name", "around"), list(zip(IN_COMPOSITIONS, cycle(("local_data_parallel", "ddp", "fsdp2 by layers")), strict=False))
)
def test_a_mutant_of_experts_is_caught_in_compositions(name: str, around: str) -> None:
    """What goes wrong over the ranks of experts is seen inside data parallelism, too."""
    scenario = a_scenario(*AROUND[around])
    assert mutant(name).applies(scenario)
    caught = check(scenario, alter=mutant(name).plant).outcome
    assert caught in (Outcome.DIVERGED, Outcome.HUNG, Outcome.CRASHED)
