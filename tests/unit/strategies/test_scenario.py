"""Rules for generated scenarios: valid, varied, and simple once shrunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st

from equivcheck.layouts.composition.limits import can_resume, limit_reason, repair_layout, repair_training
from equivcheck.layouts.composition.registry import layout_names
from equivcheck.scenario import (
    DDP,
    FSDP2,
    SGD,
    ActivationSharding,
    Adam,
    AuxiliaryLinear,
    Axis,
    ClipNorm,
    ClipValue,
    Data,
    Head,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    LocalTensorParallel,
    LoRALinear,
    Loss,
    Mesh,
    Model,
    Norm,
    NormType,
    Parallelism,
    Pipeline,
    PlannedParallelism,
    Precision,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
    ZeroGrad,
)
from equivcheck.scenario.mesh import TP
from equivcheck.scenario.optimizer import OPTIMIZERS
from equivcheck.strategies import data, layouts, models, optimizers, plan, scenarios, trainings
from equivcheck.strategies.plan import with_usual_bases
from equivcheck.strategies.stages import with_usual_workarounds
from support.fresh import drawn_afresh

SIMPLEST = Training(model=Model(features=1, layers=(Layer(width=1),)), data=Data(microbatches=(1,)))
OF_TOKENS = Model(features=4, length=2, source=Tokens(vocabulary=3), layers=(Layer(width=4, bias=False),), head=Head())
"""The simplest training for layouts that shard positions."""


SAMPLED = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def drawn(count: int, **options: object) -> list[Scenario]:
    """This number of generated scenarios, always the same ones."""
    found: list[Scenario] = []

    def collect(scenario: Scenario) -> None:
        found.append(scenario)

    drawn_afresh(scenarios(**options), examples=count, under=SAMPLED)(collect)()  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def sample() -> list[Scenario]:
    """A thousand scenarios over all layouts."""
    return drawn(1000)


def shrunk(condition: Callable[[Scenario], bool], is_simplest: Callable[[Scenario], bool]) -> Scenario:
    """The simplest scenario that Hypothesis finds. In one of thirty runs it stops early, and starts again from other examples."""
    scenario = None
    for number in range(3):
        scenario = find(scenarios(), condition, settings=settings(max_examples=5000, database=None), random=Random(number))
        if is_simplest(scenario):
            break
    assert scenario is not None
    return scenario


def test_every_scenario_is_supported(sample: list[Scenario]) -> None:
    """Limits are respected without rejecting examples."""
    assert {limit_reason(scenario.training, scenario.layout) for scenario in sample} == {None}


def test_every_layout_is_drawn_with_trainings(sample: list[Scenario]) -> None:
    """No layout is always repaired to another one."""
    assert {scenario.layout.name for scenario in sample} == set(layout_names())


def test_layouts_come_equally_often() -> None:
    """Hypothesis mutates earlier examples, so shares are uneven, but none is below a third."""
    counts: Counter[str] = Counter()
    drawn_afresh(layouts(), examples=5000, under=SAMPLED)(lambda layout: counts.update([layout.name]))()
    assert min(counts.values()) > 0.33 * counts.total() / len(layout_names())


def bases_of_adapters(*parallelisms: Parallelism) -> set[bool]:
    """Whether bases of adapters are frozen, in 100 drawn trainings on ranks with these parallelisms."""
    model = Model(features=4, length=2, source=Tokens(vocabulary=3), layers=(LoRALinear(rank=1),), head=Head())
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2))), parallelisms=parallelisms)
    found: Counter[bool] = Counter()

    @st.composite
    def usual(draw: st.DrawFn) -> Training:
        return with_usual_bases(draw, replace(SIMPLEST, model=model), layout)

    drawn_afresh(usual(), examples=100, under=SAMPLED)(lambda each: found.update([each.model.layers[0].frozen_base]))()
    assert found[True] < 50 or not found[False]
    return set(found)


def test_bases_that_become_trainable_are_usually_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known issue of DDP over tensor parallelism is reached, but hides few adapters."""
    monkeypatch.setattr(plan, "is_torch_in", lambda _versions: False)
    assert bases_of_adapters(TensorParallel(), DDP()) == {True, False}
    assert bases_of_adapters(TensorParallel(), FSDP2()) == {True}
    assert bases_of_adapters(LocalTensorParallel(), DDP()) == {True}
    monkeypatch.setattr(plan, "is_torch_in", lambda _versions: True)
    assert bases_of_adapters(TensorParallel(), FSDP2()) == {True, False}


@pytest.mark.parametrize("inner", ["", " x context_parallel"])
def test_microbatches_of_fsdp_stages_usually_have_one_size(inner: str) -> None:
    """A known issue of FSDP2 stages is reached, but hides few other faults, whatever splits the stages' activations."""
    sizes = [set(scenario.training.data.microbatches) for scenario in drawn(500, layouts=(f"fsdp2 x pipeline{inner}",))]
    assert 0 < sum(len(each) > 1 for each in sizes) < 0.1 * len(sizes)


def test_frequent_known_issues_of_pipelines_are_usually_avoided() -> None:
    """A known issue that nearly any pipeline can show is reached, but hides few other faults."""
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="pp", size=1)))
    layout = Layout(mesh=mesh, parallelisms=(Pipeline(), FSDP2()))
    training = replace(SIMPLEST, data=Data(microbatches=(4,)), clipping=ClipNorm(norm_type=NormType.INF))
    crashing = Scenario(training=training, layout=layout)
    assert limit_reason(training, layout) is None
    found: Counter[bool] = Counter()

    @st.composite
    def usual(draw: st.DrawFn) -> Scenario:
        return with_usual_workarounds(draw, crashing)

    drawn_afresh(usual(), examples=100, under=SAMPLED)(lambda each: found.update([each == crashing]))()
    assert 0 < found[True] < 50


def test_most_scenarios_are_distinct(sample: list[Scenario]) -> None:
    """Few checks are spent on repeated scenarios."""
    assert len(set(sample)) > 0.75 * len(sample)


def has_layer(condition: Callable[[Layer], bool]) -> Callable[[Scenario], bool]:
    """Whether any layer meets a condition."""
    return lambda scenario: any(condition(layer) for layer in scenario.training.model.layers)


def has_norm_type(norm_type: NormType) -> Callable[[Scenario], bool]:
    """Whether gradients are clipped by a norm."""
    return lambda scenario: isinstance(scenario.training.clipping, ClipNorm) and scenario.training.clipping.norm_type is norm_type


def has_plan(condition: Callable[[LayerPlan], bool]) -> Callable[[Scenario], bool]:
    """Whether a tensor-parallel plan on at least two ranks has this entry."""
    return lambda scenario: any(
        isinstance(parallelism, TensorParallel) and scenario.layout.mesh.num_ranks > 1 and any(map(condition, parallelism.plan))
        for parallelism in scenario.layout.parallelisms
    )


FEATURES: dict[str, tuple[float, Callable[[Scenario], bool]]] = {
    "frozen": (0.1, has_layer(lambda layer: layer.frozen)),
    "frozen base of an adapter": (0.01, has_layer(lambda layer: layer.frozen_base)),
    "unused auxiliary": (0.05, has_layer(lambda layer: layer.auxiliary is AuxiliaryLinear.NEVER)),
    "conditional auxiliary": (0.05, has_layer(lambda layer: layer.auxiliary is AuxiliaryLinear.EVEN_STEPS)),
    "residual": (0.1, has_layer(lambda layer: layer.residual)),
    "dropout": (0.1, has_layer(lambda layer: layer.dropout > 0)),
    "no bias": (0.1, has_layer(lambda layer: not layer.bias)),
    "layer norm": (0.1, has_layer(lambda layer: layer.norm is Norm.LAYER)),
    "RMS norm": (0.1, has_layer(lambda layer: layer.norm is Norm.RMS)),
    "scale": (0.04, lambda scenario: scenario.training.model.scale),
    "counter": (0.1, lambda scenario: scenario.training.model.counter),
    "square": (
        0.3,
        lambda scenario: any(
            1 < width == scenario.training.model.in_features(index)
            for index, width in enumerate(scenario.training.model.widths[1:])
        ),
    ),
    "five layers": (0.07, lambda scenario: len(scenario.training.model.layers) == 5),
    "group without decay": (
        0.05,
        lambda scenario: (
            scenario.training.optimizer.weight_decay > 0 and any(group.weight_decay == 0 for group in scenario.training.groups)
        ),
    ),
    "clip norm 1": (0.03, has_norm_type(NormType.ONE)),
    "clip norm 2": (0.03, has_norm_type(NormType.TWO)),
    "clip norm inf": (0.03, has_norm_type(NormType.INF)),
    "clip value": (0.03, lambda scenario: isinstance(scenario.training.clipping, ClipValue)),
    "schedule": (0.2, lambda scenario: scenario.training.schedule is not None),
    "even microbatches": (
        0.15,
        lambda scenario: len(scenario.training.data.microbatches) > 1 and len(set(scenario.training.data.microbatches)) == 1,
    ),
    "uneven microbatches": (0.15, lambda scenario: len(set(scenario.training.data.microbatches)) > 1),
    "three steps": (0.5, lambda scenario: scenario.training.steps >= 3),
    "float32": (0.1, lambda scenario: scenario.training.precision is Precision.FLOAT32),
    "zeroed to zero": (0.1, lambda scenario: scenario.training.zero_grad is ZeroGrad.ZERO),
    "nesterov": (0.01, lambda scenario: isinstance(scenario.training.optimizer, SGD) and scenario.training.optimizer.nesterov),
    "amsgrad": (0.02, lambda scenario: isinstance(scenario.training.optimizer, Adam) and scenario.training.optimizer.amsgrad),
    "maximize": (0.1, lambda scenario: scenario.training.optimizer.maximize),
    "foreach": (0.1, lambda scenario: scenario.training.optimizer.implementation is Implementation.FOREACH),
    "fused": (0.05, lambda scenario: scenario.training.optimizer.implementation is Implementation.FUSED),
    "one rank": (0.03, lambda scenario: scenario.layout.mesh.num_ranks == 1),
    "two ranks": (0.1, lambda scenario: scenario.layout.mesh.num_ranks == 2),
    "an odd number of ranks": (0.1, lambda scenario: scenario.layout.mesh.num_ranks in (3, 5, 7)),
    "replicas of shards": (0.03, lambda scenario: len(scenario.layout.mesh.axes) == 2 and min(scenario.layout.mesh.shape) > 1),
    "an axis of size 1 beside another": (
        0.02,
        lambda scenario: 1 in scenario.layout.mesh.shape and scenario.layout.mesh.num_ranks > 1,
    ),
    "three axes": (0.05, lambda scenario: len(scenario.layout.mesh.axes) == 3),
    "data ranks beside tensor-parallel ones": (
        0.1,
        lambda scenario: scenario.layout.num_data_ranks > 1 and scenario.layout.mesh.size(TP) > 1,
    ),
}

PLAN_FEATURES: dict[str, tuple[float, Callable[[Scenario], bool]]] = {
    "column plan": (0.1, has_plan(lambda entry: entry.split is Split.COLWISE)),
    "row plan": (0.1, has_plan(lambda entry: entry.split is Split.ROWWISE)),
    "sequence parallel": (0.05, has_plan(lambda entry: entry.output is ActivationSharding.ROWS)),
    "outside the plan": (0.1, has_plan(lambda entry: entry.split is Split.NOT_IN_PLAN)),
    "features that are sharded": (0.02, has_plan(lambda entry: entry.output is ActivationSharding.FEATURES)),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_reached(feature: str, sample: list[Scenario]) -> None:
    """Features that hide or show faults are drawn often enough."""
    share, condition = FEATURES[feature]
    assert sum(map(condition, sample)) >= share * len(sample)


@pytest.fixture(scope="module")
def sample_of_plans() -> list[Scenario]:
    """Scenarios with tensor parallelism."""
    return drawn(300, layouts=("tensor_parallel",))


@pytest.mark.parametrize("feature", PLAN_FEATURES)
def test_every_feature_of_plans_is_reached(feature: str, sample_of_plans: list[Scenario]) -> None:
    """If a layout has a plan, each option in it is drawn often enough."""
    share, condition = PLAN_FEATURES[feature]
    assert sum(map(condition, sample_of_plans)) >= share * len(sample_of_plans)


def test_weights_are_shared_where_a_layout_lets_layers_share(sample: list[Scenario]) -> None:
    """Tensor-parallel plans untie weights; other layouts share them often enough."""
    able = [scenario for scenario in sample if not scenario.layout.has(PlannedParallelism)]
    assert sum(map(has_layer(lambda layer: layer.shares is not None), able)) >= 0.11 * len(able)


def test_resumes_are_rare(sample: list[Scenario]) -> None:
    """A second layout is rare by default, because it costs twice as much."""
    share = sum(scenario.resume is not None for scenario in sample) / len(sample)
    assert 0.003 < share < 0.1
    able = [name for name in layout_names() if LocalTensorParallel.tag not in name]  # whose plain parts no checkpoint takes
    assert sum(scenario.resume is not None for scenario in drawn(100, resumes=st.just(True), layouts=able)) > 20


def test_checkpoints_come_from_layouts_that_can_save_them() -> None:
    """A schedule that is drawn for a first layout changes no option back that checkpoints need."""
    layouts_before = {each.resume.layout for each in drawn(400, resumes=st.just(True), layouts=("pipeline",)) if each.resume}
    assert len(layouts_before) > 20
    assert all(map(can_resume, layouts_before))


@pytest.mark.torch(">=2.11", "earlier versions have no mse_loss of DTensors")
def test_a_loss_that_propagation_gets_wrong_is_drawn_now_and_then() -> None:
    """Under SPMD a mean of squared errors is rare, because its gradient is known to be wrong. Given trainings keep theirs."""
    found = set(drawn(400, layouts=("spmd",)))
    means = sum(scenario.training.loss is Loss.MSE_MEAN for scenario in found)
    assert 0 < means <= 0.18 * len(found)
    given_losses = {scenario.training.loss for scenario in drawn(20, layouts=("spmd",), trainings=st.just(SIMPLEST))}
    assert given_losses == {Loss.MSE_MEAN}


def test_no_norm_is_over_a_single_feature(sample: list[Scenario]) -> None:
    """A constant inside a model would leave only rounding errors to compare."""
    for model in (scenario.training.model for scenario in sample):
        assert all(layer.norm is None or model.in_features(index) > 1 for index, layer in enumerate(model.layers))


def test_every_optimizer_is_reached(sample: list[Scenario]) -> None:
    """At most one optimizer that few layouts support may be missing by chance."""
    missing = set(OPTIMIZERS) - {type(scenario.training.optimizer) for scenario in sample}
    assert len(missing) <= 1
    for kind in missing:
        found = drawn(100, trainings=trainings(optimizers=optimizers(kinds=st.just(kind))))
        assert any(type(scenario.training.optimizer) is kind for scenario in found)


ON_SEVERAL_RANKS = {"pipeline": [pytest.mark.torch(">=2.10", "earlier versions have no stages on several ranks over gloo")]}
SHRUNK_IN_EACH_RUN = ("ddp",)


def _marks(layout: str) -> list[pytest.MarkDecorator]:
    return ON_SEVERAL_RANKS.get(layout, []) + [pytest.mark.slow] * (layout not in SHRUNK_IN_EACH_RUN)


def test_the_simplest_scenario_is_plain_ddp_on_one_rank() -> None:
    """Without a condition, scenarios shrink to this one."""
    mesh = Mesh(axes=(Axis(name="dp", size=1),))
    simplest = Scenario(training=SIMPLEST, layout=Layout(mesh=mesh, parallelisms=(DDP(),)))
    assert shrunk(lambda scenario: True, simplest.__eq__) == simplest


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in layout_names()])
def test_a_fault_of_one_layout_shrinks_to_two_ranks_and_defaults(name: str) -> None:
    """A fault that needs two ranks in a layout leaves nothing else."""
    scenario = shrunk(
        lambda scenario: scenario.layout.name == name and scenario.layout.mesh.num_ranks > 1,
        lambda scenario: scenario.layout.mesh.num_ranks == 2 and (scenario.layout, scenario.training) == plainest(scenario),
    )
    assert scenario.layout.mesh.num_ranks == 2
    assert (scenario.layout, scenario.training) == plainest(scenario)
    assert scenario.training.data.batch <= 2


def plainest(scenario: Scenario) -> tuple[Layout, Training]:
    """The scenario's layout and training with default options, its mesh and its rows."""
    plain = tuple(type(parallelism)() for parallelism in scenario.layout.parallelisms)
    shards_positions = any(parallelism.shards_positions for parallelism in plain)
    simplest = replace(SIMPLEST, model=OF_TOKENS) if shards_positions else repair_training(SIMPLEST, scenario.layout)
    training = replace(simplest, data=scenario.training.data)
    return repair_layout(replace(scenario.layout, parallelisms=plain)), training


@pytest.mark.parametrize(
    ("condition", "simplest"),
    [
        (lambda scenario: scenario.training.steps >= 2, {"steps": 2}),
        pytest.param(
            lambda scenario: isinstance(scenario.training.optimizer, Adam), {"optimizer": Adam()}, marks=pytest.mark.slow
        ),
        pytest.param(
            lambda scenario: isinstance(scenario.training.clipping, ClipNorm), {"clipping": ClipNorm()}, marks=pytest.mark.slow
        ),
        pytest.param(
            lambda scenario: len(scenario.training.model.layers) >= 2,
            {"model": Model(features=1, layers=(Layer(width=1),) * 2)},
            marks=pytest.mark.slow,
        ),
        (lambda scenario: len(set(scenario.training.data.microbatches)) > 1, {"data": Data(microbatches=(1, 2))}),
    ],
)
def test_a_fault_of_one_feature_shrinks_to_that_feature(
    condition: Callable[[Scenario], bool], simplest: dict[str, object]
) -> None:
    """Only features that the fault needs stay."""
    expected = Training(**{"model": SIMPLEST.model, "data": SIMPLEST.data, **simplest})  # type: ignore[arg-type]
    assert shrunk(condition, lambda scenario: scenario.training == expected).training == expected


@pytest.mark.slow
def test_a_fault_of_a_frozen_layer_shrinks_to_one_beside_another() -> None:
    """A second layer stays, because something must be trained."""
    expected = {(Layer(width=1), Layer(width=1, frozen=True)), (Layer(width=1, frozen=True), Layer(width=1))}
    found = shrunk(has_layer(lambda layer: layer.frozen), lambda scenario: scenario.training.model.layers in expected)
    assert found.training.model.layers in expected


@pytest.mark.parametrize("name", layout_names())
def test_layouts_can_be_named(name: str) -> None:
    """Names restrict the layouts, and `max_ranks` their size."""
    found = drawn(30, layouts=(name,), max_ranks=3)
    assert {scenario.layout.name for scenario in found} == {name}
    assert max(scenario.layout.mesh.num_ranks for scenario in found) <= 3


def test_parts_can_be_chosen() -> None:
    """Strategies for parts are arguments, and a given layout is used unchanged."""
    layout = Layout(mesh=Mesh(axes=(Axis(name="dp", size=2),)), parallelisms=(DDP(no_sync=True),))
    given_trainings = trainings(
        models=models(max_layers=2), data=data(rows=st.just(3), max_microbatches=1), optimizers=optimizers(kinds=st.just(Adam))
    )
    for scenario in drawn(30, trainings=given_trainings, layouts=st.just(layout), resumes=st.just(False)):
        assert scenario.layout == layout
        assert len(scenario.training.model.layers) <= 2
        assert scenario.training.data.microbatches == (6,)
        assert type(scenario.training.optimizer) is Adam


def test_a_given_plan_is_kept() -> None:
    """Tensor parallelism keeps a given plan, and the training is adapted to it."""
    plan = (LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))
    layout = Layout(mesh=Mesh(axes=(Axis(name="tp", size=2),)), parallelisms=(TensorParallel(plan=plan),))
    for scenario in drawn(30, layouts=st.just(layout)):
        assert scenario.layout == layout
        assert limit_reason(scenario.training, layout) is None


def test_a_third_is_of_sequences(sample: list[Scenario]) -> None:
    """If a layout also runs other models, a third use sequences, mostly tokens. If positions are sharded, all do."""
    for_context_parallel = [any(each.shards_positions for each in scenario.layout.parallelisms) for scenario in sample]
    assert all(each.training.model.length for each, is_cut in zip(sample, for_context_parallel, strict=True) if is_cut)
    models = [scenario.training.model for scenario, is_cut in zip(sample, for_context_parallel, strict=True) if not is_cut]
    assert 0.27 <= sum(model.length is not None for model in models) / len(models) <= 0.43
    assert 0.22 <= sum(model.source is not None for model in models) / len(models) <= 0.4
