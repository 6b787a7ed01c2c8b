"""Weights with uses in stages of several ranks: each has a copy, and what they leave is what one device computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st

from equivcheck import Outcome, Scenario, check
from equivcheck.layouts.base.limits.repairs import has_ties
from equivcheck.layouts.composition.fitting import fit_scenario
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.layouts.parallelisms.pipeline import apply, limits
from equivcheck.layouts.parallelisms.pipeline.communication import PIPELINE_COMMUNICATION
from equivcheck.layouts.parallelisms.pipeline.stages import weights_of_several_ranks
from equivcheck.mutants.registry import mutant
from equivcheck.scenario import (
    DDP,
    FSDP2,
    Activation,
    AdamW,
    Axis,
    ClipNorm,
    CrossEntropy,
    Data,
    GatedMLP,
    Head,
    Layer,
    Layout,
    Loss,
    Mesh,
    Model,
    Norm,
    NormType,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Resume,
    Tokens,
    Training,
)
from equivcheck.scenario.mesh import PP
from equivcheck.strategies import scenarios, trainings
from equivcheck.worlds.trace.differences import Phase as Moment
from support.exported import differences_of_traces, run_script
from support.fresh import drawn_afresh
from support.supported import require_supported
from support.verdicts import first_divergence

pytestmark = pytest.mark.mostly_equivalent

SIM_EXAMPLES = max(6, settings().max_examples // 16)
GLOO_EXAMPLES = 8
RESUMED_EXAMPLES = max(4, settings().max_examples // 25)
UNHURRIED = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate), suppress_health_check=list(HealthCheck))
TIED = Model(
    features=4,
    source=Tokens(vocabulary=7, padding=1),
    length=3,
    layers=(Layer(width=4, bias=False), GatedMLP(hidden=4), GatedMLP(hidden=3), Layer(width=4, bias=False)),
    head=Head(tied=True, norm=Norm.RMS),
)
SHARED = Model(
    features=4,
    layers=(
        Layer(width=4),
        Layer(width=4, shares=0, activation=Activation.TANH),
        Layer(width=4, norm=Norm.RMS),
        Layer(width=4, shares=0),
    ),
)
GATED = replace(TIED, layers=(GatedMLP(hidden=4),) * 4)
LABELS = CrossEntropy()


def a_scenario(
    pipeline: Pipeline, *, ranks: int = 2, model: Model = TIED, loss: CrossEntropy | Loss = LABELS, rows: tuple[int, ...] = (8, 8)
) -> Scenario:
    """Two steps of microbatches, clipped."""
    clipping = ClipNorm(max_norm=0.1)
    training = Training(model=model, data=Data(microbatches=rows), loss=loss, optimizer=AdamW(), clipping=clipping, steps=2)
    return Scenario(training=training, layout=a_layout(pipeline, ranks))


def a_layout(parallelism: Parallelism, ranks: int = 2) -> Layout:
    """Of that many ranks."""
    return Layout(mesh=Mesh(axes=(Axis(name=parallelism.axes[0][0], size=ranks),)), parallelisms=(parallelism,))


def sharing(**options: object) -> Scenario:
    """Of real targets, with one weight in three layers."""
    return a_scenario(**options, model=SHARED, loss=Loss.MSE_MEAN)  # type: ignore[arg-type]


def has_copies(scenario: Scenario) -> bool:
    """Whether several ranks of a pipeline have copies of one weight."""
    return any(
        weights_of_several_ranks(scenario.training.model, pipeline, layout.mesh.size(PP))
        for layout in scenario.layouts
        for pipeline in layout.of(Pipeline)
    )


TYING = trainings().filter(lambda training: has_ties(training.model))
SCENARIOS = {
    "two": a_scenario(Pipeline(num_chunks=2)),
    "ends_of_four": a_scenario(Pipeline(num_chunks=4), ranks=4),
    "1f1b": a_scenario(Pipeline(schedule=PipelineSchedule.ONE_F_ONE_B, num_chunks=4)),
    "interleaved": a_scenario(Pipeline(schedule=PipelineSchedule.INTERLEAVED, stages_per_rank=2, num_chunks=2)),
    "interleaved_zero_bubble": a_scenario(
        Pipeline(schedule=PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, stages_per_rank=2, num_chunks=2),
        model=GATED,
    ),
    "uneven_microbatches": a_scenario(Pipeline(num_chunks=2), rows=(8, 4)),
    "layers": sharing(pipeline=Pipeline(num_chunks=2)),
    "layers_of_three_ranks": sharing(pipeline=Pipeline(num_chunks=3, boundaries=(1, 3)), ranks=3, rows=(6, 6)),
    "layers_of_several_stages": sharing(pipeline=Pipeline(schedule=PipelineSchedule.LOOPED_BFS, stages_per_rank=2, num_chunks=2)),
    "scaled": sharing(pipeline=Pipeline(num_chunks=2, scale_grads=True), rows=(8,)),
}
MISTAKES = {
    "pipeline_copies_not_summed": Moment.GRADIENT,
    "pipeline_copies_summed_each_microbatch": Moment.GRADIENT,
    "pipeline_copies_in_norm": Moment.CLIPPING,
}
"""Mutants, and what each shows in."""
CONNECTED = pytest.mark.torch(
    ">=2.10", "before, stages of several ranks greet each other in another element type than they expect"
)


@CONNECTED
@drawn_afresh(scenarios(layouts=("pipeline",), max_ranks=6, trainings=TYING), examples=SIM_EXAMPLES, under=UNHURRIED)
def test_drawn_copies_equal_one_device(scenario: Scenario) -> None:
    """Whatever the schedule, the stages and the uses, copies stay one weight, and collectives are as predicted."""
    assume(has_copies(scenario))
    check(scenario).assert_no_finding()


@pytest.mark.slow
@drawn_afresh(scenarios(layouts=("pipeline",), max_ranks=2, trainings=TYING), examples=GLOO_EXAMPLES, under=UNHURRIED)
def test_drawn_copies_equal_one_device_over_gloo(scenario: Scenario) -> None:
    """Real processes leave the same."""
    assume(has_copies(scenario))
    check(scenario, world="gloo").assert_no_finding()


@CONNECTED
@drawn_afresh(
    scenarios(
        layouts=("pipeline", "ddp", "fsdp2"),
        max_ranks=4,
        trainings=trainings(steps=st.sampled_from((2, 3))).filter(lambda training: has_ties(training.model)),
        resumes=st.just(True),
    ),
    examples=RESUMED_EXAMPLES,
    under=UNHURRIED,
)
def test_drawn_copies_go_on_from_a_checkpoint(scenario: Scenario) -> None:
    """Copies are saved and loaded by the names of the whole model, whichever layout has them."""
    assume(scenario.resume is not None and has_copies(scenario))
    check(scenario).assert_no_finding()


@pytest.mark.parametrize("name", SCENARIOS)
def test_copies_equal_one_device_and_calls_are_as_predicted(name: str) -> None:
    """A weight counts once in the norm, and its gradients are summed once a step over the ranks that have a copy."""
    scenario = SCENARIOS[name]
    require_supported(scenario)
    assert has_copies(scenario)
    verdict = check(scenario)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    summed = [call for call in verdict.calls[0] if call.op == "all_reduce.sum" and call.num_bytes > 8]
    assert len(summed) == scenario.training.steps


@pytest.mark.parametrize("around", [DDP(), FSDP2()], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("model", ["two", "layers"])
def test_copies_are_saved_as_one_weight(around: Parallelism, model: str) -> None:
    """A checkpoint of a pipeline is one of the whole model, and the other way round."""
    scenario = SCENARIOS[model]
    require_supported(scenario)
    for first, second in ((scenario.layout, a_layout(around)), (a_layout(around), scenario.layout)):
        resumed = replace(scenario, layout=second, resume=Resume(layout=first, flatten_optimizer_state_dict=True))
        assert check(resumed).outcome is Outcome.EQUIVALENT, check(resumed).describe()


def test_a_v_of_stages_has_one_weight_for_both_ends() -> None:
    """The first rank has the first stage and the last, so that nothing is summed."""
    scenario = a_scenario(Pipeline(schedule=PipelineSchedule.DUAL_PIPE_V, stages_per_rank=2, num_chunks=4), model=GATED)
    require_supported(scenario)
    verdict = check(scenario)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    assert not has_copies(scenario)


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("model", ["two", "ends_of_four", "layers_of_three_ranks"])
def test_mistakes_with_copies_are_caught(name: str, model: str) -> None:
    """Sums that are left out or made again, and norms that count copies, show in the first step."""
    scenario = SCENARIOS[model]
    require_supported(scenario)
    first = first_divergence(check(scenario, alter=mutant(name).plant))
    assert (first.step, first.phase) == (0, MISTAKES[name])


def test_a_sum_that_is_not_predicted_is_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of pipelines are compared, though what stages send is not."""
    require_supported(SCENARIOS["two"])
    silent = replace(PIPELINE_COMMUNICATION, calls=lambda _view, _pipeline: {})
    monkeypatch.setattr(apply.PipelineKind, "communication", silent)
    scenario = replace(SCENARIOS["two"], training=replace(SCENARIOS["two"].training, seed=91))
    verdict = check(scenario)
    assert verdict.outcome is Outcome.DIVERGED
    assert any("all_reduce.sum over pp in compute" in found for found in (verdict.reason, *verdict.followers))


def test_a_norm_of_largest_elements_counts_copies_as_it_likes() -> None:
    """The largest of all elements is the largest of copies as well: such a mutant would not be wrong."""
    scenario = SCENARIOS["two"]
    clipping = ClipNorm(norm_type=NormType.INF)
    assert not mutant("pipeline_copies_in_norm").applies(
        replace(scenario, training=replace(scenario.training, clipping=clipping))
    )


def test_what_two_stages_of_a_rank_share_is_not_scaled_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two divides the gradient: a limit, beyond which it is found, and which is repaired by a weight for each."""
    pipeline = Pipeline(schedule=PipelineSchedule.LOOPED_BFS, stages_per_rank=2, num_chunks=2, scale_grads=True)
    scenario = sharing(pipeline=pipeline, rows=(8,))
    require_supported(replace(scenario, training=replace(scenario.training, model=TIED)))
    assert "a weight that two stages on one rank share" in str(why_unsupported(scenario))
    repaired = fit_scenario(scenario)
    assert not has_ties(repaired.training.model)
    assert check(repaired).outcome is Outcome.EQUIVALENT
    others = tuple(limit for limit in limits.LIMITS if limit is not limits.SCALED_BY_EACH_STAGE)
    monkeypatch.setattr(apply.PipelineKind, "limits", others)
    assert first_divergence(check(scenario)).tensor == "layers.0.linear.weight"


@pytest.mark.parametrize("name", ["ends_of_four", "layers", "layers_of_three_ranks", "layers_of_several_stages"])
def test_a_script_has_copies(name: str, tmp_path: Path) -> None:
    """With torch alone ranks leave what one device does."""
    scenario = SCENARIOS[name]
    require_supported(scenario)
    _, printed = run_script(scenario, tmp_path)
    assert sorted(printed) == sorted(differences_of_traces(scenario))
