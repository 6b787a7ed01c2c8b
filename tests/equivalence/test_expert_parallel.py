"""Experts shared out over ranks: what one device computes, with the calls that can be foreseen."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivcheck import check
from equivcheck.export.script import script_of
from equivcheck.layouts.base.script.numbers import Numbers
from equivcheck.layouts.composition.limits import repair_training, why_unsupported
from equivcheck.layouts.parallelisms.expert_parallel import exchange
from equivcheck.scenario import (
    DDP,
    FSDP2,
    Attention,
    Axis,
    Checkpointing,
    Compile,
    Data,
    ExpertParallel,
    Experts,
    Head,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Replicate,
    Replicator,
    Scenario,
    TensorParallel,
    Tokens,
    Wrapping,
)
from equivcheck.worlds.trace.stage import Stage
from support.clipped import clipped_scenario
from support.exported import printed_differences, run_script
from support.supported import require_supported
from support.verdicts import first_divergence, require_predicted

EXPERTS = Experts(hidden=3, num_experts=3, top_k=2, normalised=True, bias=True, norm=Norm.RMS, shared=True)


def a_scenario(*around: Parallelism, ranks: int = 2, layer: Experts = EXPERTS, **execution: object) -> Scenario:
    """Two steps of two microbatches of unequal size, clipped by norm; two data ranks around where something is."""
    model = Model(
        features=4, source=Tokens(vocabulary=7), length=3, layers=(Attention(), layer, layer), head=Head(tied=True, norm=Norm.RMS)
    )
    axes = {**({"dp": 2} if around else {}), "ep": ranks}
    return clipped_scenario(model, axes, ExpertParallel(), *around, microbatches=(12, 24), **execution)


@pytest.mark.parametrize("num_experts", [2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_uneven_experts_and_ranks_without_any_equal_one_device(num_experts: int, ranks: int) -> None:
    """Of two experts over four ranks two hold none: they send rows, and take part in every call."""
    layer = replace(EXPERTS, num_experts=num_experts, weighs_input=num_experts == 3)
    require_predicted(a_scenario(ranks=ranks, layer=layer))


def test_ranks_without_a_row_for_their_experts_equal_one_device() -> None:
    """One row of one position chooses one of eight experts: seven compute nothing, on ranks of which one sends nothing."""
    scenario = a_scenario(ranks=4, layer=replace(EXPERTS, num_experts=8, top_k=1, normalised=False, shared=False))
    training = replace(scenario.training, model=replace(scenario.training.model, length=1), data=Data(microbatches=(4,)))
    check(replace(scenario, training=training)).assert_equivalent()


@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.EVERY_LAYER])
def test_a_layer_makes_five_all_to_alls(checkpointing: Checkpointing) -> None:
    """Counts and rows there and back, and both gradients; what is computed again is exchanged again."""
    verdict = check(a_scenario(checkpointing=checkpointing))
    verdict.assert_equivalent()
    of_step = Counter(call.step for call in verdict.calls[0] if call.op == "all_to_all" and call.stage is Stage.COMPUTE)
    assert of_step == dict.fromkeys((0, 1), (5 + 3 * (checkpointing is not Checkpointing.NONE)) * 2 * 2)


AROUND = {
    "ddp": (3, DDP(bucket_cap_mb=1e-4)),
    "ddp, updates shared": (2, DDP(no_sync=True, zero_redundancy=True, parameters_as_bucket_view=True)),
    "replicate by fsdp": (2, Replicate(implementation=Replicator.FSDP, wrapping=Wrapping.PER_LAYER)),
    "fsdp2": (3, FSDP2(no_sync=True)),
    "fsdp2 by layers": (2, FSDP2(wrapping=Wrapping.PER_LAYER, gradient_divide_factor=3.0, sum_reductions=True)),
    "fsdp2 along the last dim": (2, FSDP2(shard_last_dim=True)),
}
"""Ranks that share out experts, and what is around them."""


@pytest.mark.parametrize("around", AROUND)
def test_data_parallelism_around_it(around: str) -> None:
    """Rows over both axes, and experts over one: equally many on two ranks, unequally on three."""
    ranks, parallelism = AROUND[around]
    layer = replace(EXPERTS, num_experts=5 if ranks == 3 else 4)
    scenario = a_scenario(parallelism, ranks=ranks, layer=layer, checkpointing=Checkpointing.ODD_LAYERS)
    require_supported(scenario)
    require_predicted(replace(scenario, training=repair_training(scenario.training, scenario.layout)))


def test_shards_of_replicas_around_it() -> None:
    """Eight ranks on three axes."""
    scenario = a_scenario(FSDP2(wrapping=Wrapping.PER_LAYER, all_reduce_once=True), layer=replace(EXPERTS, num_experts=3))
    axes = tuple(Axis(name=name, size=2) for name in ("dp_replicate", "dp_shard", "ep"))
    layout, training = replace(scenario.layout, mesh=Mesh(axes=axes)), replace(scenario.training, steps=1)
    require_predicted(replace(scenario, layout=layout, training=repair_training(training, layout)))


def _undivided_experts_of_shards(own: list[nn.Parameter], others: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """As `fully_shard` divides by the ranks along its own axis, where experts want the number of all that have sent them rows."""
    REDUCE(own, others, mesh)
    for parameter in own:
        if parameter.grad is not None:
            parameter.grad *= mesh.size()


def _divided_by_all(own: list[nn.Parameter], others: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Experts by the number of all ranks, after data parallelism has averaged them over some."""
    REDUCE(own, others, mesh)
    for parameter in own:
        if parameter.grad is not None:
            parameter.grad /= 2


REDUCE = exchange.reduce_gradients


@pytest.mark.parametrize("mistake", [_undivided_experts_of_shards, _divided_by_all])
@pytest.mark.parametrize("around", ["ddp", "fsdp2"])
def test_a_wrong_factor_of_experts_is_caught(monkeypatch: pytest.MonkeyPatch, mistake: object, around: str) -> None:
    """Where everything else is right, and experts are off by a factor on every rank alike."""
    monkeypatch.setattr(exchange, "reduce_gradients", mistake)
    assert ".experts." in first_divergence(check(a_scenario(AROUND[around][1], layer=replace(EXPERTS, num_experts=4)))).tensor


@pytest.mark.parametrize(
    "around",
    [
        pytest.param((), id="alone"),
        pytest.param((AROUND["ddp"][1],), id="ddp", marks=pytest.mark.slow),
        pytest.param((AROUND["fsdp2 by layers"][1],), id="fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_script_computes_what_ranks_compute(around: tuple[Parallelism, ...], tmp_path: Path) -> None:
    """A script of torch alone has the exchange in full, and puts experts of all ranks together."""
    layer = replace(EXPERTS, dropout=0.25, weighs_input=bool(around), shared=not around)
    scenario = a_scenario(*around, layer=layer)
    assert scenario.training.model.layers[1] == layer
    _, differences = run_script(scenario, tmp_path)
    assert any("experts.gate" in place for place in differences)


def test_a_script_shows_what_ranks_get_wrong(tmp_path: Path) -> None:
    """Where the division is taken out of it, experts differ from one device, and nothing else does in the first gradient."""
    scenario = a_scenario(layer=replace(EXPERTS, num_experts=3))
    right = script_of(scenario, numbers=Numbers.EXACT)
    wrong = right.replace("divide_gradients([*own, *others], mesh.size())", "divide_gradients(others, mesh.size())")
    assert wrong != right
    code, differences, printed = printed_differences(wrong, 2, tmp_path)
    assert code == 1, printed
    first = {place for place, value in differences.items() if place.startswith("step 0 gradient") and value > 1e-9}
    assert first == {place for place in differences if place.startswith("step 0 gradient") and ".experts." in place}


@pytest.mark.parametrize("around", [FSDP2(), Replicate(implementation=Replicator.FSDP)], ids=["fsdp2", "replicate"])
def test_units_of_shards_have_an_expert_on_every_rank(around: Parallelism) -> None:
    """What has no elements cannot be sharded; as many experts as ranks can."""
    scenario = a_scenario(around, ranks=3, layer=replace(EXPERTS, num_experts=4))
    require_supported(scenario)
    assert "a rank without experts" in (why_unsupported(scenario) or "")
    assert why_unsupported(replace(scenario, training=repair_training(scenario.training, scenario.layout))) is None


def test_only_data_parallelism_is_around_it() -> None:
    """Of tensor parallelism the limit says why."""
    scenario = a_scenario(DDP())
    axes = (Axis(name="tp", size=2), Axis(name="ep", size=2))
    layout = replace(scenario.layout, mesh=Mesh(axes=axes), parallelisms=(ExpertParallel(), TensorParallel()))
    assert "DDP" in (why_unsupported(replace(scenario, layout=layout)) or "")


def test_what_no_graph_holds_is_not_compiled() -> None:
    """The limit says why."""
    assert "depends on values" in (why_unsupported(a_scenario(compile=Compile.AOT_EAGER)) or "")
