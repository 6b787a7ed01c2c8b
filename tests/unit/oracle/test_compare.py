"""Tests for the comparison between traces and a reference."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from equivcheck.oracle.comparison.compare import Comparison, compare
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.scenario import Adam, AuxiliaryLinear, ClipNorm, Data, Layer, Model, Training
from equivcheck.training.loop import single_device_setup, train
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
    """A single-device run's trace."""
    with one_thread():
        return train(single_device_setup(TRAINING))


def with_step(trace: Trace, index: int, **changes: object) -> Trace:
    """Replace fields in one step."""
    steps = list(trace.steps)
    steps[index] = replace(steps[index], **changes)  # type: ignore[arg-type]
    return replace(trace, steps=tuple(steps))


def moved(snapshot: Snapshot, position: int, factor: float) -> Snapshot:
    """Multiply one value in a snapshot."""
    values = snapshot.values.copy()
    values[position] *= factor
    return replace(snapshot, values=values)


def only(comparison: Comparison) -> tuple[int, Phase, str, Difference, int]:
    """Identify the only divergence."""
    (divergence,) = comparison.divergences
    return divergence.step, divergence.phase, divergence.tensor, divergence.difference, divergence.rank


def test_equal_traces_do_not_differ(trace: Trace) -> None:
    """The reference agrees with itself on two ranks, with error zero."""
    assert compare(RUN.reference(), [trace] * 2) == Comparison(divergences=(), worst_error=0.0, largest_share=0.0)


def split(trace: Trace, steps: int) -> tuple[Trace, Trace]:
    """Traces from ranks that stop after some steps, and from ranks that go on."""
    none = moved(trace.state, 0, 2.0)
    return replace(trace, steps=trace.steps[:steps], state=none), replace(trace, steps=trace.steps[steps:])


def test_steps_may_be_left_by_different_ranks(trace: Trace) -> None:
    """Another number of ranks can run the first steps. Their final state is not compared."""
    before, after = split(trace, 1)
    assert compare(RUN.reference(), [after] * 2, [before] * 3).divergences == ()
    wrong = with_step(before, 0, parameters=moved(before.steps[0].parameters, 0, 2.0))
    assert only(compare(RUN.reference(), [after], [wrong, wrong]))[:2] == (0, Phase.UPDATE)
    later = with_step(after, 0, parameters=moved(after.steps[0].parameters, 0, 2.0))
    assert only(compare(RUN.reference(), [later], [before]))[:2] == (1, Phase.UPDATE)


def test_a_change_of_a_few_roundings_is_within_tolerance(trace: Trace) -> None:
    """An error by one unit in the last place is no divergence, but is measured."""
    nudged = with_step(trace, 1, gradients=moved(trace.steps[1].gradients, 0, 1 + 2e-16))

    comparison = compare(RUN.reference(), [nudged, nudged])

    assert not comparison.divergences
    assert 0 < comparison.worst_error < 1


def test_the_share_of_a_difference_is_in_units_of_its_kind(trace: Trace) -> None:
    """If a whole kind is zero, any other value is larger than noise."""
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
    """A relative change by 1e-10 is found in its phase, and in no other."""
    changed = with_step(trace, 1, **change(trace.steps[1]))

    step, phase, tensor, difference, rank = only(compare(RUN.reference(), [changed, changed]))

    assert (step, difference) == (1, Difference.VALUE)
    assert (phase, tensor, rank) == expected


def test_state_and_buffers_are_compared(trace: Trace) -> None:
    """Final optimizer state and buffers count like any tensor."""
    changed = replace(trace, state=moved(trace.state, -1, 2.0), buffers=moved(trace.buffers, 0, 2.0))

    divergences = compare(RUN.reference(), [changed]).divergences

    assert [(found.phase, found.tensor) for found in divergences] == [
        (Phase.STATE, trace.state.pieces[-1].name),
        (Phase.BUFFER, "forwards"),
    ]


def test_ranks_that_disagree_are_found_on_the_one_that_is_off(trace: Trace) -> None:
    """Replicas must agree bit for bit, so one wrong bit on one rank is a divergence on that rank."""
    values = trace.steps[0].parameters.values.copy()
    values[2] = np.nextafter(values[2], np.inf)
    off = with_step(trace, 0, parameters=replace(trace.steps[0].parameters, values=values))

    found = only(compare(RUN.reference(), [trace, trace, off]))

    assert found == (0, Phase.UPDATE, "layers.0.linear.weight", Difference.RANKS_DISAGREE, 2)


def placed(snapshot: Snapshot, start: int) -> Snapshot:
    """A snapshot whose first piece begins at `start` in a local tensor that holds several."""
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
    """Kernels round by memory position, so replicas at other positions must agree within tolerance only."""
    parameters = trace.steps[0].parameters
    first = with_step(trace, 0, parameters=placed(parameters, 0))
    other = with_step(trace, 0, parameters=placed(moved(parameters, row, factor), place))
    found = compare(RUN.reference(), [first, other]).divergences
    assert [divergence.difference for divergence in found] == [Difference.RANKS_DISAGREE] * differs


def without(snapshot: Snapshot, row: int) -> Snapshot:
    """Set one tensor in a snapshot to None."""
    start = sum(piece.numel for piece, there in zip(snapshot.pieces[:row], snapshot.present[:row], strict=True) if there)
    values = np.delete(snapshot.values, slice(start, start + snapshot.pieces[row].numel))
    flags = tuple(there and index != row for index, there in enumerate(snapshot.present))
    return replace(snapshot, present=flags, fits=flags, values=values)


def test_a_gradient_that_is_none_on_one_rank_is_missing(trace: Trace) -> None:
    """None instead of a tensor is a divergence on that rank, even if other ranks have the tensor."""
    off = with_step(trace, 0, gradients=without(trace.steps[0].gradients, 1))

    assert only(compare(RUN.reference(), [trace, off])) == (0, Phase.GRADIENT, "layers.0.linear.bias", Difference.MISSING, 1)


def test_a_tensor_on_no_rank_is_missing(trace: Trace) -> None:
    """A parameter that no rank holds is a divergence."""
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
    """A tensor instead of None is a divergence, whatever its value."""
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
    """Equal numbers in another precision differ."""
    parameters = trace.steps[0].parameters
    off = with_step(trace, 0, parameters=replace(parameters, dtypes=("float32", *parameters.dtypes[1:])))

    assert only(compare(RUN.reference(), [off])) == (0, Phase.UPDATE, "layers.0.linear.weight", Difference.DTYPE, 0)


def test_nan_is_a_difference(trace: Trace) -> None:
    """NaN instead of a number is found, with an infinite error."""
    comparison = compare(RUN.reference(), [with_step(trace, 1, gradients=moved(trace.steps[1].gradients, 0, np.nan))])

    assert only(comparison)[3] is Difference.NAN
    assert comparison.worst_error == np.inf


def test_comparison_never_stops_at_the_first_difference(trace: Trace) -> None:
    """All differences are listed, earliest step and phase first."""
    off = with_step(trace, 0, parameters=moved(trace.steps[0].parameters, 0, 2.0))
    off = with_step(off, 1, gradients=moved(trace.steps[1].gradients, 0, 2.0), loss=7.0)

    found = [(divergence.step, divergence.phase) for divergence in compare(RUN.reference(), [off]).divergences]

    assert found == [(0, Phase.UPDATE), (1, Phase.LOSS), (1, Phase.GRADIENT)]


def test_the_worst_element_is_shown_with_both_values(trace: Trace) -> None:
    """A divergence names the element with the largest error, and prints both values exactly."""
    gradients = trace.steps[1].gradients
    off = with_step(trace, 1, gradients=moved(gradients, 4, 3.0))

    (divergence,) = compare(RUN.reference(), [off]).divergences

    assert divergence.index == (1, 1)
    assert float(divergence.expected) == gradients.values[4]
    assert float(divergence.actual) == 3.0 * gradients.values[4]
    assert divergence.error > 1


def test_a_rank_without_a_loss_has_no_say(trace: Trace) -> None:
    """The loss is averaged over ranks that have one. If no rank has one, it is missing."""
    silent = with_step(trace, 0, loss=None)

    assert compare(RUN.reference(), [silent, trace]).divergences == ()
    assert only(compare(RUN.reference(), [silent, silent])) == (0, Phase.LOSS, "loss", Difference.MISSING, 0)
