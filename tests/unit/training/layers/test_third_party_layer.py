"""Tests that a third-party layer kind is drawn, run, covered and exported like the built-in ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

from equivcheck import Scenario, from_json, to_json
from equivcheck.campaign.coverage.features import features
from equivcheck.export.script import script_of
from equivcheck.layouts.composition.expected_calls import predict_calls
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.layouts.composition.registry import layout_names
from equivcheck.scenario import (
    DDP,
    FSDP2,
    SGD,
    Axis,
    Data,
    Head,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Parallelism,
    Split,
    TensorParallel,
    Tokens,
    Training,
    Wrapping,
)
from equivcheck.scenario.file_format import codec
from equivcheck.scenario.file_format.converter import LAYER_TAGS
from equivcheck.strategies import scenarios, token_models, trainings
from equivcheck.training.layers import registry
from equivcheck.worlds.trace.stage import Stage
from support.verdicts import require_predicted
from unit.training.layers.third_party import LowRank

POINT = EntryPoint("low_rank", "unit.training.layers.third_party:LowRankKind", registry.LAYER_ENTRY_POINTS)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install its entry point."""
    monkeypatch.setattr(registry, "entry_points", lambda group: (POINT,))
    monkeypatch.setattr(codec, "entry_points", lambda group: (POINT,) if group == registry.LAYER_ENTRY_POINTS else ())
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))
    monkeypatch.delitem(LAYER_TAGS, LowRank.tag, raising=False)
    _forget()
    yield
    LAYER_TAGS.pop(LowRank.tag, None)
    _forget()


def _forget() -> None:
    for cache in (registry._ask_entry_points, codec._ask_entry_points):
        cache.cache_clear()


def a_scenario(*parallelisms: Parallelism) -> Scenario:
    """Scenario with only this layer, on the smallest mesh."""
    model = Model(features=4, source=Tokens(vocabulary=3), length=2, layers=(LowRank(rank=2), LowRank(rank=1)), head=Head())
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=parallelisms)
    return Scenario(training=Training(model=model, data=Data(microbatches=(2, 4)), optimizer=SGD(), steps=2), layout=layout)


@pytest.mark.parametrize("parallelism", [DDP(bucket_cap_mb=0.0001), FSDP2(wrapping=Wrapping.PER_LAYER)])
def test_it_is_run_with_its_calls_predicted_exactly(parallelism: Parallelism) -> None:
    """Results equal the single-device run, and communication is as predicted."""
    scenario = a_scenario(parallelism)
    require_predicted(scenario)
    assert predict_calls(scenario.training, scenario.layout).totals


def test_ranks_share_it_out_by_its_own_choice() -> None:
    """Its linears determine the sharded dims and so the expected calls. Two ranks cannot share one feature."""
    model = Model(features=4, source=Tokens(vocabulary=3), length=2, layers=(LowRank(rank=2), LowRank(rank=4)), head=Head())
    plan = TensorParallel(plan=(LayerPlan(split=Split.HEADS_OR_HIDDEN),) * 2)
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(plan,))
    scenario = replace(a_scenario(DDP()), layout=layout, training=replace(a_scenario(DDP()).training, model=model))
    verdict = require_predicted(scenario)
    assert any(call.op == "all_reduce.sum" for call in verdict.calls[0] if call.stage is Stage.COMPUTE)
    thin = replace(scenario, training=replace(scenario.training, model=replace(model, layers=(LowRank(rank=1), LowRank(rank=4)))))
    assert why_unsupported(thin)


def test_it_is_read_counted_and_exported() -> None:
    """JSON uses its tag, coverage its fields, and scripts its class."""
    scenario = a_scenario(DDP())
    LAYER_TAGS.pop(LowRank.tag, None)
    assert from_json(to_json(scenario)) == scenario
    assert "training.model LowRank.rank 2" in map(str, features(scenario))
    assert "class LowRank(nn.Module):" in script_of(scenario)


def test_it_is_drawn() -> None:
    """Generated models contain it."""
    found = find(token_models(), lambda model: any(isinstance(layer, LowRank) for layer in model.layers))
    assert found.length is not None


@pytest.mark.parametrize("name", layout_names())
def test_every_layout_runs_it_or_says_why_not(name: str) -> None:
    """A layout that cannot run it has a limit with a reason, and such scenarios are not drawn."""
    options = settings(max_examples=30, phases=(Phase.generate,), database=None, suppress_health_check=list(HealthCheck))
    tokens = trainings(tokens=st.just(True))
    drawn = find(scenarios(layouts=(name,), trainings=tokens), lambda _: True, settings=options)
    assert why_unsupported(drawn) is None
    model = a_scenario(DDP()).training.model
    reason = why_unsupported(Scenario(training=a_scenario(DDP()).training, layout=drawn.layout))
    assert reason is None or reason.partition(":")[0], model
