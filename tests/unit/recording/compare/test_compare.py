"""Two runs are equivalent, divergent or undecided, and the verdict says what differs first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import equivcheck
from equivcheck import Outcome, TraceVerdict
from equivcheck.cli import main
from equivcheck.recording.trace import Clip, Moment, RecordedStep
from unit.recording.compare.written import SAMPLES, Edit, Job, Place, Values, draw, output_of, scaled, without

FROM_GRADIENTS = (Moment.UNCLIPPED, Moment.GRADIENT, Moment.UPDATE)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run A, on one rank."""
    return Job().write(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run A with moved initial parameters."""
    return Job(moved=1).write(tmp_path_factory.mktemp("moved"))


@pytest.fixture
def verdict_on(one: Path, moved: Path, tmp_path: Path) -> Callable[[Job], TraceVerdict]:
    """Compare a job with run A."""
    return lambda job: equivcheck.compare(one, job.write(tmp_path / "other"), moved=[moved])


Verdict = Callable[[Job], TraceVerdict]


@pytest.mark.parametrize("layout", ["replicas", "rows", "columns", "stages"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_right_layouts_are_equivalent(verdict_on: Verdict, layout: str, ranks: int) -> None:
    """Ranks of tensor parallelism share samples, and only a pipeline's first stage has any."""
    verdict = verdict_on(Job(ranks=ranks, layout=layout))
    assert (verdict.outcome, verdict.notes, verdict.gaps) == (Outcome.EQUIVALENT, (), ()), verdict
    for moment in ("start", "samples", "loss", "gradient before clipping", "gradient", "parameter", "state"):
        assert f"{moment}, " in verdict.coverage[0]


@pytest.mark.parametrize(
    ("job", "code"),
    [
        pytest.param(Job(ranks=2), 0, id="equivalent"),
        pytest.param(Job(change=scaled(1.5, *FROM_GRADIENTS)), 1, id="diverged"),
        pytest.param(Job(change=scaled(1.00005, Moment.UPDATE)), 3, id="no measured noise"),
        pytest.param(Job(edit=without(Moment.GRADIENT)), 3, id="a gap"),
    ],
)
def test_the_exit_code_tells_the_outcome(one: Path, tmp_path: Path, job: Job, code: int) -> None:
    """INCONCLUSIVE has one of its own."""
    other = job.write(tmp_path / "other")
    result = CliRunner().invoke(main, ["compare", str(one), str(other)])
    assert result.exit_code == code, result.output


def samples(*microbatches: range) -> Edit:
    """Other samples on each rank."""
    return lambda rank, step: replace(
        step, samples=tuple(tuple(number + 100 * step.step for number in microbatch) for microbatch in microbatches)
    )


def scaled_loss(factor: float) -> Edit:
    """Another loss."""
    return lambda rank, step: replace(step, losses=tuple(factor * loss for loss in step.losses))


def setting(**others: str) -> Edit:
    """Another optimizer setting."""
    return lambda rank, step: replace(step, settings=({**step.settings[0], **others},))


def norms(*by_rank: float) -> Edit:
    """Another norm on each rank."""
    return lambda rank, step: replace(step, clips=(Clip(norm=by_rank[rank], max_norm=1.0),))


def other_start(place: Place, values: Values) -> Values:
    """One parameter has the values of another, and one has its own in other places."""
    if place.moment is not Moment.START:
        return values
    return {"k.weight": draw(0, place.moment, "q.weight"), "up.bias": values[::-1].copy()}.get(place.name, values)


@pytest.mark.parametrize(
    ("job", "reason", "where"),
    [
        pytest.param(
            Job(ranks=2, change=scaled(1.5, *FROM_GRADIENTS)),
            "at step 0, 5 of 5 gradients before clipping differ",
            "before it, 5 initial parameters, 8 samples, 2 module outputs and the loss agree",
            id="gradient",
        ),
        pytest.param(
            Job(ranks=2, layout="rows", change=scaled(1.5, *FROM_GRADIENTS, names=("up.bias",), step=1)),
            "at step 1, 1 of 5 gradients before clipping differs",
            "before it, 1 step, 8 samples, 2 module outputs and the loss agree",
            id="later gradient",
        ),
        pytest.param(
            Job(ranks=2, change=scaled(1.5, *FROM_GRADIENTS), edit=scaled_loss(1.1)),
            "at step 0, the loss is 0.88 in B, 0.8 in A",
            "before it, 5 initial parameters, 8 samples and 2 module outputs agree",
            id="loss",
        ),
        pytest.param(
            Job(ranks=2, change=scaled(1.5, *FROM_GRADIENTS), edit=scaled_loss(1024.0)),
            "at step 0, 5 of 5 gradients before clipping differ",
            "before it, 5 initial parameters, 8 samples and 2 module outputs agree",
            id="a scaled loss is no difference",
        ),
        pytest.param(
            Job(ranks=2, change=scaled(1.5, Moment.GRADIENT, Moment.UPDATE), edit=norms(1.5, 2.0)),
            "at step 0, the gradient norm is 1.5 on rank 0, 2 on rank 1 in B, 2.5 in A",
            "before it, 5 initial parameters, 8 samples, 2 module outputs, the loss and 5 gradients before clipping agree",
            id="norm",
        ),
        pytest.param(
            Job(ranks=2, change=scaled(1.5, Moment.UPDATE), edit=setting(lr="0.02", foreach="True")),
            "at step 0, 5 of 5 parameters after the update differ; lr is 0.02 in B, 0.01 in A",
            "before it, 5 initial parameters, 8 samples, 2 module outputs, the loss, 5 gradients before clipping, the gradient "
            "norm and 5 gradients agree",
            id="setting",
        ),
        pytest.param(
            Job(ranks=2, change=scaled(1.5, *FROM_GRADIENTS), edit=setting(lr="0.02")),
            "at step 0, 5 of 5 gradients before clipping differ",
            "before it, 5 initial parameters, 8 samples, 2 module outputs and the loss agree",
            id="a setting that explains nothing",
        ),
        pytest.param(
            Job(ranks=2, change=scaled(1.5, Moment.UPDATE, names=("up.bias",), rank=1)),
            "at step 0, 1 of 5 parameters after the update differs: ranks 0 and 1 of B disagree by 1.63, ",
            "before it, 5 initial parameters, 8 samples, 2 module outputs, the loss, 5 gradients before clipping, the gradient "
            "norm and 5 gradients agree",
            id="replica",
        ),
        pytest.param(
            Job(ranks=2, layout="rows", change=other_start),
            "another start: 2 of 5 initial parameters differ; B has A's q.weight as k.weight; B has up.bias with the same "
            "numbers in other places",
            "",
            id="start",
        ),
        pytest.param(
            Job(ranks=2, change=scaled(1.5, *FROM_GRADIENTS), edit=samples(range(4), range(4))),
            "at step 0, ranks 0 and 1 of B have the same samples; 4 of 8 samples of A are not in B",
            "before it, 5 initial parameters agree",
            id="the same samples on all ranks",
        ),
        pytest.param(
            Job(ranks=2, layout="columns", change=scaled(1.5, *FROM_GRADIENTS), edit=samples(range(4))),
            "at step 0, 4 of 8 samples of A are not in B",
            "before it, 5 initial parameters agree",
            id="ranks of tensor parallelism share samples",
        ),
        pytest.param(
            Job(change=scaled(1.5, *FROM_GRADIENTS), edit=samples(range(8), range(8, 16))),
            "at step 0, 8 of 16 samples of B are not in A",
            "before it, 5 initial parameters agree",
            id="more samples",
        ),
        pytest.param(
            Job(change=scaled(1.5, *FROM_GRADIENTS), edit=samples(range(100, 108))),
            "at step 0, no sample of B is in A: other data, or inputs in another form; B's step 0 has the samples of A's step 1",
            "before it, 5 initial parameters agree",
            id="the next step's samples",
        ),
        pytest.param(
            Job(change=scaled(1.5, *FROM_GRADIENTS), edit=samples(range(8), range(1))),
            "at step 0, 1 of 8 samples counts more often, or less often, in B than in A",
            "before it, 5 initial parameters agree",
            id="a sample twice",
        ),
        pytest.param(
            Job(change=scaled(float("nan"), *FROM_GRADIENTS)),
            "at step 0, 5 of 5 gradients before clipping differ: B has NaN or infinite values",
            "before it, 5 initial parameters, 8 samples, 2 module outputs and the loss agree",
            id="nan",
        ),
    ],
)
def test_the_first_difference_is_named(verdict_on: Verdict, job: Job, reason: str, where: str) -> None:
    """With the values that agree before it."""
    verdict = verdict_on(job)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.reason.startswith(reason)
    assert verdict.where == where
    lines = str(verdict).splitlines()
    assert len(lines) <= 25
    assert all(len(line) <= 80 or "/" in line for line in lines)


def test_the_first_module_with_another_output_is_named(verdict_on: Verdict) -> None:
    """In call order; modules that only one run has are left out."""

    def edit(rank: int, step: RecordedStep) -> RecordedStep:
        outputs = [output_of(each.module, each.microbatch, step.samples[each.microbatch], 1.1) for each in step.outputs]
        kept = [new if new.module == "down" else old for old, new in zip(step.outputs, outputs, strict=True)]
        return replace(step, outputs=(*kept, output_of("extra", 0, step.samples[0])))

    verdict = verdict_on(Job(ranks=2, change=scaled(1.5, *FROM_GRADIENTS), edit=edit))
    assert verdict.reason == "at step 0, the output of down differs"
    assert verdict.where == "before it, 5 initial parameters and 8 samples agree"
    assert "record both runs with --outputs" not in str(verdict)


@pytest.mark.parametrize("factor", [65536.0, 0.5, 3.0, 1.1])
def test_another_loss_with_equal_gradients_is_a_note(verdict_on: Verdict, factor: float) -> None:
    """Gradient scalers and pipelines scale the loss."""
    verdict = verdict_on(Job(ranks=2, edit=scaled_loss(factor)))
    assert verdict.outcome is Outcome.EQUIVALENT
    (note,) = verdict.notes
    assert note.startswith("at step 0, the loss")
    assert ("times that of" in note) == (factor != 1.1)


def test_notes_of_some_ranks_name_them(verdict_on: Verdict) -> None:
    """A pipeline's other ranks may have the tensor that one lacks."""
    verdict = verdict_on(Job(ranks=2, notes=(("no tensor is called a", "no tensor is called b"), ("no tensor is called b",))))
    assert verdict.notes == ("on rank 0 of B, no tensor is called a", "in B, no tensor is called b")


def without_clipping(rank: int, step: RecordedStep) -> RecordedStep:
    """A training that clips by other means than torch's functions."""
    return replace(without(Moment.UNCLIPPED)(rank, step), clips=())


def test_clipping_by_hand_is_compared_where_the_optimizer_finds_gradients(verdict_on: Verdict) -> None:
    """No gradient before clipping is missing then."""
    verdict = verdict_on(Job(ranks=2, edit=without_clipping))
    assert verdict.outcome is Outcome.EQUIVALENT
    assert "not compared: gradient before clipping, only in A" in verdict.coverage


NOUNS = {
    Moment.START: "initial parameters",
    Moment.UNCLIPPED: "gradients before clipping",
    Moment.GRADIENT: "gradients",
    Moment.UPDATE: "updated parameters",
    Moment.STATE: "optimizer state",
    Moment.BUFFER: "buffers",
}


def lost(rank: int, step: RecordedStep) -> RecordedStep:
    """Rank 0's first sample is not in the trace."""
    return replace(step, samples=(step.samples[0][1:], *step.samples[1:])) if rank == 0 else step


def lost_microbatch(rank: int, step: RecordedStep) -> RecordedStep:
    """One microbatch is not in the trace."""
    return replace(step, samples=step.samples[1:]) if step.samples else step


@pytest.mark.parametrize("layout", ["replicas", "rows", "columns", "stages"])
@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lost, "1 of 8 samples"),
        (lost_microbatch, "backward passes of"),
        *((without(moment, rank), noun) for moment, noun in NOUNS.items() for rank in (None, 1)),
    ],
)
def test_a_trace_with_a_gap_is_never_equivalent(tmp_path: Path, layout: str, side: str, edit: Edit, reason: str) -> None:
    """A sample, a microbatch, or a moment is dropped, in either run, on all ranks or on one."""
    right, bad = Job(ranks=2).write(tmp_path / "right"), Job(ranks=2, layout=layout, edit=edit).write(tmp_path / "bad")
    verdict = equivcheck.compare(*((bad, right) if side == "A" else (right, bad)))
    assert verdict.outcome in {Outcome.INCONCLUSIVE, Outcome.DIVERGED}
    text = " ".join([verdict.reason, *verdict.gaps])
    # If the only rank of a pipeline stage lacks a moment, its tensors are missing.
    assert reason in text or (layout == "stages" and "differ: not in" in text)


def test_ranks_with_the_same_samples_prove_no_average(verdict_on: Verdict) -> None:
    """They have equal gradients with and without one."""
    verdict = verdict_on(Job(ranks=2, edit=samples(range(4), range(4, SAMPLES))))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason == "all ranks of B have the same samples, so a missing average over ranks would not show"


def test_parts_of_samples_are_no_difference(verdict_on: Verdict) -> None:
    """Context-parallel ranks have parts of each sample: twice as many hashes, and none from run A."""
    verdict = verdict_on(
        Job(ranks=2, layout="columns", edit=lambda rank, step: samples(range(1000 * rank + 500, 1000 * rank + 508))(rank, step))
    )
    verdict_samples = [note for note in verdict.notes if "no sample of B is in A" in note]
    assert (verdict.outcome, len(verdict_samples)) == (Outcome.INCONCLUSIVE, 1)


def test_a_zero_gradient_is_equal_to_none(tmp_path: Path) -> None:
    """A parameter without a use has either, depending on the layout."""
    names = ("norm.weight",)
    one = Job(change=scaled(0.0, *FROM_GRADIENTS[:2], names=names)).write(tmp_path / "one")

    def change(place: Place, values: Values) -> Values | None:
        return None if place.moment in FROM_GRADIENTS[:2] and place.name in names else values

    other = Job(ranks=2, layout="rows", change=change).write(tmp_path / "other")
    assert equivcheck.compare(one, other).outcome is Outcome.EQUIVALENT
    assert equivcheck.compare(other, one).outcome is Outcome.EQUIVALENT
    full = Job().write(tmp_path / "full")
    verdict = equivcheck.compare(full, other)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.reason == "at step 0, 1 of 5 gradients before clipping differs: not in B"
