"""Traces that cannot be compared are refused in one line: the fault, the folder, and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import equivcheck
from equivcheck import Outcome, UsageError
from equivcheck.cli import main
from equivcheck.recording.trace import Clip, Moment, RecordedStep
from unit.recording.compare.written import Edit, Job, Place, Values, scaled


def cut_off(file: Path) -> None:
    """A process was killed while it wrote its last step."""
    file.write_bytes(file.read_bytes()[:-200])


def without_last_step(file: Path) -> None:
    """A process was killed after a step."""
    file.write_text("\n".join(file.read_text().split("\n")[:-2]) + "\n")


@pytest.mark.parametrize(
    ("job", "damage", "text"),
    [
        (Job(), cut_off, "rank 0 ends in the middle of a step, after 1 complete step."),
        (Job(ranks=2), without_last_step, "only some ranks have more than 1 step."),
        (Job(asked=3), None, "it has 2 of the 3 steps that `record` was asked for."),
        (Job(ranks=2), Path.unlink, "it has ranks 1 of 2."),
    ],
)
def test_incomplete_runs_are_refused(tmp_path: Path, job: Job, damage: Callable[[Path], None] | None, text: str) -> None:
    """Complete steps can still be compared, if the reader asks for so many."""
    one, other = Job().write(tmp_path / "one"), job.write(tmp_path / "other")
    if damage is not None:
        damage(other / "rank0.ecr")
    for folders in ((one, other), (other, one)):
        with pytest.raises(UsageError) as raised:
            equivcheck.compare(*folders)
        assert str(raised.value).startswith(f"folder {other} is not valid: ")
        assert text in str(raised.value)
        assert "\n" not in str(raised.value)
        result = CliRunner().invoke(main, ["compare", *map(str, folders)])
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    if "--steps" in str(raised.value):
        assert equivcheck.compare(one, other, steps=1).outcome is Outcome.EQUIVALENT


def test_more_steps_than_both_runs_have_are_refused(tmp_path: Path) -> None:
    """With the number that is there."""
    one, other = Job(steps=3).write(tmp_path / "one"), Job(steps=2).write(tmp_path / "other")
    assert equivcheck.compare(one, other).outcome is Outcome.EQUIVALENT
    with pytest.raises(UsageError, match="you ask for 3 steps, and it has 2"):
        equivcheck.compare(one, other, steps=3)


def renamed(rank: int, step: RecordedStep) -> RecordedStep:
    """Another script's trace."""
    return replace(
        step, entries=tuple(replace(each, piece=replace(each.piece, name=f"{each.piece.name}_2")) for each in step.entries)
    )


def later(rank: int, step: RecordedStep) -> RecordedStep:
    """Recorded from another step on."""
    return replace(step, step=step.step + 5)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (renamed, "the first has up.weight, the second up.weight_2, and no tensor is in both"),
        (later, "they have no step in common"),
    ],
)
def test_runs_with_nothing_in_common_are_refused(tmp_path: Path, edit: Edit, text: str) -> None:
    """With both folders."""
    one, other = Job().write(tmp_path / "one"), Job(edit=edit).write(tmp_path / "other")
    with pytest.raises(UsageError) as raised:
        equivcheck.compare(one, other)
    assert str(raised.value).startswith(f"folders {one} and {other} are not valid together: {text}")
    result = CliRunner().invoke(main, ["compare", str(one), str(other)])
    assert result.exit_code == 2


def other_samples(rank: int, step: RecordedStep) -> RecordedStep:
    """Other data."""
    return replace(step, samples=tuple(tuple(sample + 7 for sample in own) for own in step.samples))


def other_rate(rank: int, step: RecordedStep) -> RecordedStep:
    """Another learning rate."""
    return replace(step, settings=({**step.settings[0], "lr": "0.02"},))


def other_limit(rank: int, step: RecordedStep) -> RecordedStep:
    """Another limit for the norm."""
    return replace(step, clips=(Clip(norm=2.5 + step.step, max_norm=9.0),))


def lost_tensor(place: Place, values: Values) -> Values | None:
    """A trace without a gradient."""
    return None if place.name == "up.bias" and place.moment is Moment.GRADIENT else values


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job(), "its initial parameters were not moved"),
        (Job(moved=1, steps=1), "it has no step 1"),
        (Job(moved=1, change=lost_tensor), "up.bias is missing or has another form at step 0 (gradient)"),
        (Job(moved=1, change=scaled(1.001, Moment.START, names=("up.bias",))), "it starts from another up.bias"),
        (Job(moved=1, edit=other_rate), "lr is 0.02, not 0.01, at step 0"),
        (Job(moved=1, edit=other_limit), "max_norm is 9 of the 2-norm, not 1 of the 2-norm, at step 0"),
        (Job(moved=1, edit=other_samples), "its samples at step 0 are not those of"),
        (Job(moved=1, change=scaled(1.01, Moment.GRADIENT)), "its first gradient of up.weight differs by"),
        (Job(moved=1, edit=renamed), "is missing or has another form"),
    ],
)
def test_a_moved_run_that_is_no_rerun_is_refused(tmp_path: Path, job: Job, text: str) -> None:
    """Its distance would count as rounding, and hide the mistake in the second run."""
    one, moved = Job().write(tmp_path / "one"), job.write(tmp_path / "moved")
    wrong = Job(change=scaled(1.005, Moment.GRADIENT)).write(tmp_path / "wrong")
    right = Job(moved=2).write(tmp_path / "right")
    assert equivcheck.compare(one, wrong, moved=[right]).outcome is Outcome.DIVERGED
    with pytest.raises(UsageError) as raised:
        equivcheck.compare(one, wrong, moved=[right, moved])
    assert str(raised.value).startswith(f"moved run {moved} is not valid: ")
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_noise_as_large_as_the_values_leaves_a_verdict_open(tmp_path: Path) -> None:
    """A chaotic training has such a moved run after some steps."""
    one, other = Job().write(tmp_path / "one"), Job(ranks=2).write(tmp_path / "other")
    noisy = Job(moved=1, change=scaled(1.4, Moment.GRADIENT, Moment.UPDATE, step=1)).write(tmp_path / "noisy")
    verdict = equivcheck.compare(one, other, moved=[noisy])
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason == "from step 1 on, rounding alone may change gradients by as much as they are"
    assert verdict.hint == "compare fewer steps, with --steps 1"
    assert equivcheck.compare(one, other, moved=[noisy], steps=1).outcome is Outcome.EQUIVALENT
