"""Muon whose matrices are dealt out to ranks: what one device computes, in two calls an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.parallelisms.fsdp2 import distributed_muon
from equivcheck.scenario import FSDP2, Axis, Data, Layer, Layout, Mesh, Model, Muon, Pipeline, Training, Wrapping
from equivcheck.strategies import layouts, scenarios
from equivcheck.strategies.optimizer import optimizers
from equivcheck.strategies.training import trainings
from equivcheck.worlds.trace.differences import Phase
from support.exported import differences_of_traces, run_script
from support.fresh import drawn_afresh
from support.verdicts import first_divergence, require_predicted

UNHURRIED = settings(deadline=None, suppress_health_check=list(HealthCheck))
MUON = trainings(optimizers=optimizers(kinds=st.just(Muon)))


def dealt_out(layout: Layout) -> Layout:
    """The same with owners."""
    parallelisms = (replace(each, distributed_muon=True) if isinstance(each, FSDP2) else each for each in layout.parallelisms)
    return replace(layout, parallelisms=tuple(parallelisms))


def layouts_of(name: str) -> st.SearchStrategy[Layout]:
    """Drawn, with owners."""
    return layouts(tags=(name,)).map(dealt_out)


@pytest.mark.parametrize(
    ("name", "examples"),
    [("fsdp2", max(6, settings().max_examples // 16)), ("fsdp2 x local_tensor_parallel", max(4, settings().max_examples // 25))],
)
def test_owners_equal_one_device(name: str, examples: int) -> None:
    """Uneven shards, ranks that own nothing, groups, frozen and shared weights, replicas."""

    @drawn_afresh(scenarios(layouts=layouts_of(name), trainings=MUON), examples=examples, under=UNHURRIED)
    def equivalent(scenario: Scenario) -> None:
        check(scenario).assert_no_finding()

    equivalent()


@pytest.mark.slow
@drawn_afresh(scenarios(layouts=layouts_of("fsdp2"), trainings=MUON, max_ranks=4), examples=4, under=UNHURRIED)
def test_owners_equal_one_device_over_gloo(scenario: Scenario) -> None:
    """Real processes, too."""
    check(scenario, world="gloo").assert_no_finding()


MODEL = Model(features=3, layers=tuple(Layer(width=width, bias=False) for width in (5, 2, 4)))


def scenario(*sizes: int, fsdp: FSDP2 | None = None, model: Model = MODEL) -> Scenario:
    """Three matrices, of which ranks have unequal shards."""
    names = ("dp",) if len(sizes) == 1 else ("dp_replicate", "dp_shard")
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
    training = Training(model=model, data=Data(microbatches=(8,)), optimizer=Muon(), steps=2)
    layout = Layout(mesh=mesh, parallelisms=(fsdp or FSDP2(wrapping=Wrapping.PER_LAYER, distributed_muon=True),))
    return Scenario(training=training, layout=layout)


@pytest.mark.parametrize("sizes", [(2,), (4,), (8,), (2, 2), (2, 1), (1, 4)], ids=str)
def test_an_update_is_two_calls(sizes: tuple[int, ...]) -> None:
    """Over the ranks that share a matrix, however many matrices there are; none where one rank has all."""
    verdict = require_predicted(scenario(*sizes))
    assert verdict.calls is not None
    exchanges = [call for call in verdict.calls[0] if call.op == "all_to_all"]
    assert len(exchanges) == (2 * 2 if sizes[-1] > 1 else 0)


def test_a_matrix_with_fewer_rows_than_ranks_is_within_limits() -> None:
    """DTensor loses such a shard in Muon's products; an owner has it whole."""
    alone = FSDP2(wrapping=Wrapping.PER_LAYER)
    assert check(scenario(4, fsdp=alone)).outcome is Outcome.UNSUPPORTED
    assert check(scenario(4)).outcome is Outcome.EQUIVALENT


@pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stage_of_frozen_layers_has_nothing_to_update(frozen: int) -> None:
    """Its parameters have no owners, and its ranks exchange nothing."""
    layers = tuple(Layer(width=4, bias=False, frozen=index == frozen) for index in range(2))
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="pp", size=2)))
    layout = Layout(mesh=mesh, parallelisms=(Pipeline(), FSDP2(distributed_muon=True)))
    training = replace(scenario(2).training, model=Model(features=4, layers=layers))
    verdict = check(Scenario(training=training, layout=layout))
    verdict.assert_equivalent()
    assert verdict.calls is not None
    exchanging = [any(call.op == "all_to_all" for call in calls) for calls in verdict.calls]
    assert exchanging == [index != frozen for index in (0, 1)] * 2


def _of_shards(update: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Each half of the rows by itself."""
    return torch.cat([RIGHT(part, settings) for part in update.chunk(2)]) if len(update) > 1 else RIGHT(update, settings)


RIGHT = distributed_muon._orthogonal
WRONG: dict[str, Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]] = {
    "orthogonalised in parts": _of_shards,
    "not orthogonalised": lambda update, _settings: update,
    "rate of another shape": lambda update, settings: (
        RIGHT(update, settings) / max(1.0, update.shape[0] / update.shape[1]) ** 0.5
    ),
    "rate of a thousandth more": lambda update, settings: RIGHT(update, settings) * 1.001,
    "rows in another order": lambda update, settings: RIGHT(update.flip(0), settings),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_owner_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first update, whichever way it is wrong."""
    monkeypatch.setattr(distributed_muon, "_orthogonal", WRONG[name])
    first = first_divergence(check(scenario(2)))
    assert (first.step, first.phase) == (0, Phase.UPDATE)


@pytest.mark.parametrize(
    ("sizes", "fsdp"), [((4,), FSDP2(distributed_muon=True)), ((2, 2), FSDP2(distributed_muon=True, shard_last_dim=True))]
)
def test_a_script_has_the_optimizer_of_the_ranks(sizes: tuple[int, ...], fsdp: FSDP2, tmp_path: Path) -> None:
    """Word for word, so that it prints no more than rounding."""
    case = scenario(
        *sizes, fsdp=fsdp, model=Model(features=4, layers=tuple(Layer(width=width, bias=False) for width in (6, 2, 4)))
    )
    script, printed = run_script(case, tmp_path, verdict=check(case))
    assert printed.keys() == differences_of_traces(case).keys()
    assert "class DistributedMuon" in script
    assert "equivcheck.layouts.parallelisms" not in script
