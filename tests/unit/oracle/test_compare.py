"""Tests for the comparison of traces."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from equivcheck.oracle.comparison.compare import Comparison, compare
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.scenario import Adam, AuxiliaryLinear, ClipNorm, Data, Layer, Model, Training
from equivcheck.training.loop import train
from equivcheck.training.single_device import single_device
from equivcheck.training.threads import one_thread
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.trace.trace import Snapshot, Trace

TRAINING = Training(
    model=Model(features=3, layers=(Layer(width=4, auxiliary=AuxiliaryLinear.NEVER), Layer(width=2)), counter=True),
    data=Data(microbatches=(4, 2)),
    optimizer=Adam(),
    clipping=ClipNorm(),
    steps=2,
)
RUN = ReferenceRun(TRAINING)


@pytest.fixture
def trace() -> Trace:
    """What one device leaves."""
    with one_thread():
        return train(single_device(TRAINING))


def with_step(trace: Trace, index: int, **changes: object) -> Trace:
    """A trace with something else in one step."""
    steps = list(trace.steps)
    steps[index] = replace(steps[index], **changes)  # type: ignore[arg-type]
    return replace(trace, steps=tuple(steps))


def moved(snapshot: Snapshot, position: int, factor: float) -> Snapshot:
    """A snapshot with one value multiplied."""
    values = snapshot.values.copy()
    values[position] *= factor
    return replace(snapshot, values=values)


def only(comparison: Comparison) -> tuple[int, Phase, str, Difference, int]:
    """What identifies the one divergence of a comparison."""
    (divergence,) = comparison.divergences
    return divergence.step, divergence.phase, divergence.tensor, divergence.difference, divergence.rank


def test_equal_traces_do_not_differ(trace: Trace) -> None:
    """The reference agrees with itself on two ranks, without any error."""
    assert compare(RUN.reference(), [trace] * 2) == Comparison(divergences=(), worst_error=0.0, largest_share=0.0)


def split(trace: Trace, steps: int) -> tuple[Trace, Trace]:
    """What is left by ranks that run so many steps and then stop, and by those that go on."""
    none = moved(trace.state, 0, 2.0)
    return replace(trace, steps=trace.steps[:steps], state=none), replace(trace, steps=trace.steps[steps:])


def test_steps_may_be_left_by_different_ranks(trace: Trace) -> None:
    """The first steps are those of other, and other many, ranks; their state is nobody's concern."""
    before, after = split(trace, 1)
    assert compare(RUN.reference(), [after] * 2, [before] * 3).divergences == ()
    wrong = with_step(before, 0, parameters=moved(before.steps[0].parameters, 0, 2.0))
    assert only(compare(RUN.reference(), [after], [wrong, wrong]))[:2] == (0, Phase.UPDATE)
    later = with_step(after, 0, parameters=moved(after.steps[0].parameters, 0, 2.0))
    assert only(compare(RUN.reference(), [later], [before]))[:2] == (1, Phase.UPDATE)


def test_a_change_of_a_few_roundings_is_within_tolerance(trace: Trace) -> None:
    """An error of one unit in the last place is not a divergence, but is measured."""
    nudged = with_step(trace, 1, gradients=moved(trace.steps[1].gradients, 0, 1 + 2e-16))

    comparison = compare(RUN.reference(), [nudged, nudged])

    assert not comparison.divergences
    assert 0 < comparison.worst_error < 1


def test_the_share_of_a_difference_is_in_units_of_its_kind(trace: Trace) -> None:
    """What is other than zero where a whole kind is zero is larger than any noise."""
    found = RUN.reference()
    row = next(index for index, moment in enumerate(found.moments) if moment.phase is Phase.GRADIENT)
    gradients = found.moments[row]
    zero = {name: np.zeros_like(getattr(gradients, name)) for name in ("values", "norms", "tolerances", "scales")}
    dead = replace(found, moments=(*found.moments[:row], replace(gradients, **zero), *found.moments[row + 1 :]))
    twice = with_step(trace, 0, gradients=replace(trace.steps[0].gradients, values=2 * trace.steps[0].gradients.values))

    assert compare(found, [twice]).largest_share == pytest.approx(1.0)
    assert compare(dead, [trace]).largest_share == np.inf


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda step: {"loss": step.loss * (1 + 1e-10)}, (Phase.LOSS, "loss", -1)),
        (lambda step: {"gradients": moved(step.gradients, 3, 1 + 1e-10)}, (Phase.GRADIENT, "layers.0.linear.weight", 0)),
        (lambda step: {"clip_norm": step.clip_norm * (1 + 1e-10)}, (Phase.CLIPPING, "norm", 0)),
        (lambda step: {"clipped": moved(step.clipped, 3, 1 + 1e-10)}, (Phase.CLIPPING, "layers.0.linear.weight", 0)),
        (lambda step: {"parameters": moved(step.parameters, -1, 1 + 1e-10)}, (Phase.UPDATE, "layers.1.linear.bias", 0)),
    ],
    ids=["loss", "gradient", "clip norm", "clipped", "parameter"],
)
def test_every_phase_is_compared(
    trace: Trace, change: Callable[..., dict[str, object]], expected: tuple[Phase, str, int]
) -> None:
    """A relative change of 1e-10 in any phase is found where it was made, and nowhere else."""
    changed = with_step(trace, 1, **change(trace.steps[1]))

    step, phase, tensor, difference, rank = only(compare(RUN.reference(), [changed, changed]))

    assert (step, difference) == (1, Difference.VALUE)
    assert (phase, tensor, rank) == expected


def test_state_and_buffers_are_compared(trace: Trace) -> None:
    """Optimizer state and buffers at the end count like any tensor."""
    changed = replace(trace, state=moved(trace.state, -1, 2.0), buffers=moved(trace.buffers, 0, 2.0))

    divergences = compare(RUN.reference(), [changed]).divergences

    assert [(found.phase, found.tensor) for found in divergences] == [
        (Phase.STATE, trace.state.pieces[-1].name),
        (Phase.BUFFER, "forwards"),
    ]


def test_ranks_that_disagree_are_found_on_the_one_that_is_off(trace: Trace) -> None:
    """Replicas agree bit for bit, so a single last bit on one rank is a divergence there."""
    values = trace.steps[0].parameters.values.copy()
    values[2] = np.nextafter(values[2], np.inf)
    off = with_step(trace, 0, parameters=replace(trace.steps[0].parameters, values=values))

    found = only(compare(RUN.reference(), [trace, trace, off]))

    assert found == (0, Phase.UPDATE, "layers.0.linear.weight", Difference.RANKS_DISAGREE, 2)


def placed(snapshot: Snapshot, start: int) -> Snapshot:
    """A snapshot whose first piece shares a local tensor with others, of which it begins at `start`."""
    first, *others = snapshot.pieces
    return replace(snapshot, pieces=(replace(first, place=(start, 100)), *others))


@pytest.mark.parametrize(
    ("row", "factor", "place", "differs"),
    [
        (0, 1 + 2e-16, 0, True),
        (0, 1 + 2e-16, 8, False),
        (0, 1 + 1e-10, 8, True),
        (1, 1 + 2e-16, 0, True),
        (1, 1 + 2e-16, 8, False),
    ],
    ids=["alike", "elsewhere", "elsewhere and far off", "beside one alike", "beside one elsewhere"],
)
def test_replicas_that_lie_alike_agree_bit_for_bit(trace: Trace, row: int, factor: float, place: int, differs: bool) -> None:
    """Kernels round by where an element lies: what is computed with some that lie elsewhere agrees within tolerance."""
    parameters = trace.steps[0].parameters
    first = with_step(trace, 0, parameters=placed(parameters, 0))
    other = with_step(trace, 0, parameters=placed(moved(parameters, row, factor), place))
    found = compare(RUN.reference(), [first, other]).divergences
    assert [divergence.difference for divergence in found] == [Difference.RANKS_DISAGREE] * differs


def without(snapshot: Snapshot, row: int) -> Snapshot:
    """A snapshot in which one tensor is None."""
    start = sum(piece.numel for piece, there in zip(snapshot.pieces[:row], snapshot.present[:row], strict=True) if there)
    values = np.delete(snapshot.values, slice(start, start + snapshot.pieces[row].numel))
    flags = tuple(there and index != row for index, there in enumerate(snapshot.present))
    return replace(snapshot, present=flags, fits=flags, values=values)


def test_a_gradient_that_is_none_on_one_rank_is_missing(trace: Trace) -> None:
    """None where the reference has a tensor is a divergence on that rank, even if other ranks have it."""
    off = with_step(trace, 0, gradients=without(trace.steps[0].gradients, 1))

    assert only(compare(RUN.reference(), [trace, off])) == (0, Phase.GRADIENT, "layers.0.linear.bias", Difference.MISSING, 1)


def test_a_tensor_on_no_rank_is_missing(trace: Trace) -> None:
    """A parameter that no rank has is a divergence rather than skipped."""
    pieces = trace.steps[0].parameters.pieces[:-1]
    flags = (True,) * len(pieces)
    short = replace(
        trace.steps[0].parameters,
        pieces=pieces,
        present=flags,
        fits=flags,
        dtypes=("float64",) * len(pieces),
        values=trace.steps[0].parameters.values[:-2],
    )
    off = with_step(trace, 0, parameters=short)

    assert only(compare(RUN.reference(), [off, off])) == (0, Phase.UPDATE, "layers.1.linear.bias", Difference.MISSING, -1)


def test_a_gradient_where_the_reference_has_none_is_extra(trace: Trace) -> None:
    """A tensor where the reference has None is a divergence, whatever its value."""
    gradients = trace.steps[0].gradients
    row = gradients.present.index(False)
    start = sum(piece.numel for piece, there in zip(gradients.pieces[:row], gradients.present[:row], strict=True) if there)
    flags = (True,) * len(gradients.pieces)
    values = np.insert(gradients.values, [start] * gradients.pieces[row].numel, 0.0)
    off = with_step(
        trace, 0, gradients=replace(gradients, present=flags, fits=flags, dtypes=("float64",) * len(flags), values=values)
    )

    assert only(compare(RUN.reference(), [off])) == (0, Phase.GRADIENT, "layers.0.auxiliary.weight", Difference.EXTRA, 0)


def test_another_element_type_is_a_difference(trace: Trace) -> None:
    """Equal numbers in another precision are not equal."""
    parameters = trace.steps[0].parameters
    off = with_step(trace, 0, parameters=replace(parameters, dtypes=("float32", *parameters.dtypes[1:])))

    assert only(compare(RUN.reference(), [off])) == (0, Phase.UPDATE, "layers.0.linear.weight", Difference.DTYPE, 0)


def test_nan_is_a_difference(trace: Trace) -> None:
    """NaN where the reference has a number is found, and is infinitely far off."""
    comparison = compare(RUN.reference(), [with_step(trace, 1, gradients=moved(trace.steps[1].gradients, 0, np.nan))])

    assert only(comparison)[3] is Difference.NAN
    assert comparison.worst_error == np.inf


def test_comparison_never_stops_at_the_first_difference(trace: Trace) -> None:
    """Everything that differs is listed, earliest step and phase first."""
    off = with_step(trace, 0, parameters=moved(trace.steps[0].parameters, 0, 2.0))
    off = with_step(off, 1, gradients=moved(trace.steps[1].gradients, 0, 2.0), loss=7.0)

    found = [(divergence.step, divergence.phase) for divergence in compare(RUN.reference(), [off]).divergences]

    assert found == [(0, Phase.UPDATE), (1, Phase.LOSS), (1, Phase.GRADIENT)]


def test_the_worst_element_is_shown_with_both_values(trace: Trace) -> None:
    """A divergence names the element that is furthest off and prints both values so that they read back exactly."""
    gradients = trace.steps[1].gradients
    off = with_step(trace, 1, gradients=moved(gradients, 4, 3.0))

    (divergence,) = compare(RUN.reference(), [off]).divergences

    assert divergence.index == (1, 1)
    assert float(divergence.expected) == gradients.values[4]
    assert float(divergence.actual) == 3.0 * gradients.values[4]
    assert divergence.error > 1


def test_a_rank_without_a_loss_has_no_say(trace: Trace) -> None:
    """The loss is the mean over the ranks that have one; where none has, it is missing."""
    silent = with_step(trace, 0, loss=None)

    assert compare(RUN.reference(), [silent, trace]).divergences == ()
    assert only(compare(RUN.reference(), [silent, silent])) == (0, Phase.LOSS, "loss", Difference.MISSING, 0)
