"""Logits that stay in parts, and their loss under `loss_parallel`: what one device computes, with calls as predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from equivcheck import Outcome, check
from equivcheck.layouts.base.limits.repairs import with_labels
from equivcheck.layouts.composition.fitting import fit_scenario, fit_training
from equivcheck.layouts.composition.registry import TIMES, BrokenLayout, layout_names
from equivcheck.layouts.parallelisms.tensor_parallel.communication import TensorParallelCalls
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    ActivationSharding,
    AdamW,
    Axis,
    Checkpointing,
    Compile,
    CrossEntropy,
    Data,
    Execution,
    GatedMLP,
    Head,
    IgnoredLabels,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Pipeline,
    Replicate,
    Replicator,
    Scenario,
    Split,
    TensorParallel,
    Tokens,
    Training,
)
from equivcheck.scenario.mesh import DP, PP, TP
from equivcheck.strategies import resume, scenarios, trainings
from equivcheck.strategies.resume import may_resume, with_drawn_resume
from equivcheck.system.torch_version import is_torch_in
from support.exported import run_script
from support.fresh import drawn_afresh
from support.verdicts import require_predicted

pytestmark = pytest.mark.mostly_equivalent

LAYOUTS = tuple(name for name in layout_names() if name.rpartition(TIMES)[2] == TensorParallel.tag)
EXAMPLES = max(2, settings().max_examples // 50)
RESUMABLE = ("tensor_parallel", "fsdp2 x tensor_parallel")
RESUMED_EXAMPLES = max(4, settings().max_examples // 25)
UNHURRIED = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate), suppress_health_check=list(HealthCheck))
DECODER = Model(
    features=4,
    source=Tokens(vocabulary=7, padding=1),
    length=4,
    layers=(Layer(width=4, norm=Norm.RMS, residual=True), GatedMLP(hidden=4)),
    head=Head(norm=Norm.RMS, bias=True),
)
LABELS = CrossEntropy(ignored=IgnoredLabels.SOME)
COLUMN = Split.COLWISE
EAGER = Execution()


def a_scenario(
    *around: Parallelism,
    model: Model = DECODER,
    loss: CrossEntropy | Loss = LABELS,
    output: ActivationSharding = ActivationSharding.REPLICATED,
    ranks: int = 2,
    execution: Execution = EAGER,
) -> Scenario:
    """Two steps of two microbatches of unequal size, with an embedding that is cut by features."""
    data, axes = Data(microbatches=(4, 2)), (Axis(name=TP, size=ranks),)
    if around:
        axes = (Axis(name=DP, size=2), *axes)
    entries = tuple(LayerPlan(split=split, output=output) for split in (COLUMN, Split.HEADS_OR_HIDDEN))
    is_tied = model.head is not None and model.head.tied
    source = Split.ROWWISE if is_tied else COLUMN
    plan = TensorParallel(plan=entries, source=source, source_output=output, head=COLUMN, loss_parallel=True)
    training = Training(model=model, data=data, loss=loss, optimizer=AdamW(), steps=2)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=axes), parallelisms=(plan, *around), execution=execution))


def keeps_logits_apart(scenario: Scenario) -> bool:
    """Whether some layout of a scenario does."""
    return any(plan.loss_parallel for layout in scenario.layouts for plan in layout.of(TensorParallel))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawn_losses_in_parts_equal_one_device(layout: str) -> None:
    """Under any plan that is drawn with it, alone and within other parallelisms."""
    drawn = scenarios(layouts=(layout,), trainings=trainings(tokens=st.just(True)).map(with_labels))

    examples = EXAMPLES if layout == TensorParallel.tag else EXAMPLES // 2

    @drawn_afresh(drawn, examples=examples, under=UNHURRIED)
    def equivalent(scenario: Scenario) -> None:
        assume(keeps_logits_apart(scenario))
        check(scenario).assert_no_finding()

    equivalent()


@st.composite
def resumed_scenarios(draw: st.DrawFn) -> Scenario:
    """Those of which the first or the second layout keeps logits apart, or both do."""
    trained = trainings(tokens=st.just(True), steps=st.sampled_from((2, 3))).map(with_labels)
    scenario = draw(scenarios(layouts=RESUMABLE, max_ranks=4, trainings=trained, executions=st.just(EAGER)))
    assume(keeps_logits_apart(scenario) and may_resume(scenario))
    scenario = with_drawn_resume(draw, scenario)
    assume(scenario.resume is not None)
    if scenario.resume is not None and draw(st.booleans()):
        resume = replace(scenario.resume, layout=scenario.layout)
        scenario = replace(scenario, layout=scenario.resume.layout, resume=resume)
    return scenario


@pytest.mark.slow
def test_a_checkpoint_of_losses_in_parts_is_no_interruption() -> None:
    """Whichever layout goes on from the other's, every step and the state are those of one device."""
    seen = set()

    @drawn_afresh(resumed_scenarios(), examples=RESUMED_EXAMPLES, under=UNHURRIED)
    def equivalent(scenario: Scenario) -> None:
        seen.add(tuple(any(plan.loss_parallel for plan in layout.of(TensorParallel)) for layout in scenario.layouts))
        check(scenario).assert_no_finding()

    equivalent()
    assert seen >= {(True, False), (False, True)}


def test_layouts_that_want_another_loss_each_are_not_resumed() -> None:
    """One that keeps logits apart takes the loss of labels alone, which a pipeline that scales gradients has none of."""
    scales = Layout(mesh=Mesh(axes=(Axis(name=PP, size=1),)), parallelisms=(Pipeline(num_chunks=2, scale_grads=True),))
    with pytest.raises(BrokenLayout, match="a limit for checkpoints still applies after 64 repairs"):
        fit_training(a_scenario().training, a_scenario().layout, scales)
    drawn = {}

    @given(st.data())
    @settings(UNHURRIED, max_examples=1, database=None)
    def draw(data: st.DataObject) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resume, "_FIRST_LAYOUTS", st.just(scales))
            patch.setattr(resume, "with_drawn_schedule", lambda _draw, layout: layout)
            drawn["resumed"] = with_drawn_resume(data.draw, a_scenario())

    draw()
    assert drawn["resumed"] == a_scenario()


@pytest.mark.parametrize(
    "scenario",
    [
        a_scenario(),
        a_scenario(output=ActivationSharding.ROWS),
        a_scenario(model=replace(DECODER, head=Head(tied=True))),
        a_scenario(model=replace(DECODER, offset=True, counter=True)),
        a_scenario(ranks=4),
        a_scenario(ranks=1),
        a_scenario(loss=CrossEntropy(class_weights=True)),
        a_scenario(loss=CrossEntropy(ignored=IgnoredLabels.FIRST_ROWS, summed=True)),
        a_scenario(loss=CrossEntropy(ignored=IgnoredLabels.FIRST_MICROBATCH)),
        a_scenario(execution=Execution(checkpointing=Checkpointing.EVERY_LAYER)),
        a_scenario(DDP()),
        a_scenario(DDP(static_graph=True)),
        a_scenario(FSDP1()),
        a_scenario(FSDP2()),
        a_scenario(Replicate()),
    ],
    ids=[
        "plain",
        "rows",
        "tied",
        "buffers",
        "uneven",
        "alone",
        "weights",
        "first_rows",
        "first_microbatch",
        "recomputed",
        "ddp",
        "static_graph",
        "fsdp1",
        "fsdp2",
        "replicate",
    ],
)
def test_logits_are_never_gathered_and_calls_are_as_predicted(scenario: Scenario) -> None:
    """Whatever the vocabulary, the loss and what is around, each row has its maximum, its sum and its label's logit reduced."""
    require_predicted(scenario)


@pytest.mark.skipif(is_torch_in("<2.10"), reason="there a limit")
@pytest.mark.parametrize(
    "around", [(), (FSDP2(),), (Replicate(implementation=Replicator.FSDP),)], ids=["alone", "fsdp2", "replicate"]
)
def test_a_z_loss_gathers_logits(around: tuple[Parallelism, ...]) -> None:
    """DTensor takes the `logsumexp` of whole rows: one call more, which is predicted."""
    require_predicted(a_scenario(*around, loss=CrossEntropy(z_loss=0.01, class_weights=True)))


def test_a_traced_step_has_the_loss_in_parts() -> None:
    """The handlers of `loss_parallel` are there while a step is traced, and its graph has what they do."""
    scenario = a_scenario(execution=Execution(whole_step=True))
    training = replace(scenario.training, optimizer=SGD())
    assert check(replace(scenario, training=training)).outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(a_scenario(), id="plain"),
        pytest.param(a_scenario(DDP()), id="ddp"),
        pytest.param(
            a_scenario(execution=Execution(compile=Compile.AOT_EAGER, per_layer=True)), id="compiled", marks=pytest.mark.slow
        ),
    ],
)
def test_losses_are_computed_in_parts_by_processes(scenario: Scenario) -> None:
    """Real processes leave the same."""
    assert check(scenario, world="gloo").outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize(
    ("scenario", "repaired"),
    [
        (a_scenario(loss=Loss.MSE_MEAN), "loss"),
        (a_scenario(model=replace(DECODER, head=None)), "model"),
        (a_scenario(model=replace(DECODER, scale=True)), "model"),
        (a_scenario(model=replace(DECODER, source=Tokens(vocabulary=5)), ranks=4), "model"),
    ],
    ids=["real_targets", "no_head", "scale", "rank_without_classes"],
)
def test_what_has_no_loss_in_parts_is_repaired(scenario: Scenario, repaired: str) -> None:
    """Such a scenario is beyond a limit, whose repair changes that part of the training alone."""
    found = fit_scenario(scenario)
    assert check(scenario).outcome is Outcome.UNSUPPORTED
    assert getattr(found.training, repaired) != getattr(scenario.training, repaired)
    assert replace(found.training, **{repaired: getattr(scenario.training, repaired)}) == scenario.training
    assert check(found).outcome is Outcome.EQUIVALENT


def test_smoothed_labels_are_refused_or_known() -> None:
    """`loss_parallel` does not support them: DTensor refuses a step of it, but for torch 2.10, where gradients are wrong."""
    outcome = check(a_scenario(loss=CrossEntropy(label_smoothing=0.1)), beyond=True).outcome
    assert outcome is (Outcome.KNOWN if is_torch_in("==2.10.*") else Outcome.CRASHED)


def test_weights_of_ignored_labels_are_known_to_raise() -> None:
    """Torch looks up the weight of a label that is no class."""
    verdict = check(a_scenario(loss=CrossEntropy(class_weights=True, ignored=IgnoredLabels.SOME)))
    assert verdict.outcome is Outcome.KNOWN


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(a_scenario(model=replace(DECODER, offset=True)), id="offset"),
        pytest.param(a_scenario(DDP(no_sync=True)), id="ddp", marks=pytest.mark.slow),
        pytest.param(a_scenario(FSDP2(), output=ActivationSharding.ROWS), id="fsdp2"),
    ],
)
def test_a_script_computes_losses_in_parts(scenario: Scenario, tmp_path: Path) -> None:
    """With torch alone ranks leave what one device does, also where losses are averaged over data ranks."""
    script, _ = run_script(scenario, tmp_path)
    assert "loss_parallel() if parallel else nullcontext()" in script


def test_a_reduction_that_is_not_predicted_is_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without those of the loss in the prediction, the maximum over ranks is one call too many."""
    monkeypatch.setattr(TensorParallelCalls, "loss", lambda *_: None)
    scenario = replace(a_scenario(), schedule_seed=5)
    verdict = check(replace(scenario, training=replace(scenario.training, seed=77, steps=1)))
    assert verdict.outcome is Outcome.DIVERGED
    assert "all_reduce.max over tp in compute" in verdict.reason
