"""`compare`: find the first value that differs between two recorded runs, whatever their layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.recording.adapters.matching import match_names
from equivcheck.recording.adapters.names import Names, require_names
from equivcheck.recording.adapters.precision import match_copies
from equivcheck.recording.causes.find import find_cause
from equivcheck.recording.compare.coverage import coverage_of, gaps_of
from equivcheck.recording.compare.facts import Facts
from equivcheck.recording.compare.judge import CLUES, groups_of, judge
from equivcheck.recording.compare.moved import require_like_first
from equivcheck.recording.compare.outputs import compare_outputs
from equivcheck.recording.compare.runs import RecordedRun, read_run, run_of
from equivcheck.recording.compare.samples import compare_samples
from equivcheck.recording.compare.scalars import compare_losses, compare_norms
from equivcheck.recording.compare.settings import other_settings
from equivcheck.recording.compare.tensors import Tolerance, compare_tensors, keys_of
from equivcheck.recording.compare.verdict import TensorDifference, TraceVerdict
from equivcheck.recording.compare.words import agreeing, headline, hint_for, notes_of
from equivcheck.recording.trace import Moment
from equivcheck.recording.trace_file import read_trace
from equivcheck.system.collection import rare_collections
from equivcheck.worlds.trace.differences import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two recorded runs, with all values that were compared."""

    facts: Facts
    """Both runs, with their samples, losses and optimizer settings."""
    tolerance: Tolerance
    """Function that returns the distance explained by rounding. If there are moved runs, they measure it."""
    tensors: tuple[TensorDifference, ...]
    """All compared values in training order, also those that agree."""
    verdict: TraceVerdict
    """Outcome, first difference and the mistake that explains it."""

    def clues(self, step: int) -> list[TensorDifference]:
        """Compare samples, module outputs, loss and gradient norm in one step, to show where an error begins.

        The field `tensors` has these comparisons only up to the first step with a difference.
        """
        return list(_clues(self.facts, step, self.tolerance))


def compare(
    one: str | Path,
    other: str | Path,
    *,
    moved: Sequence[str | Path] = (),
    steps: int | None = None,
    names: Names | None = None,
) -> TraceVerdict:
    """Compare two runs that `record` wrote. Layouts and numbers of ranks may differ.

    `moved` are runs like the first one, recorded with ``record(..., moved=1)``. They measure the rounding noise. Without them, a
    difference is DIVERGED only if rounding cannot make it: other initial parameters, missing tensors, NaN in one run, or first
    gradients that are wrong by more than sqrt(eps) times their norm. `steps` limits the comparison to the first steps. With
    `steps`, runs that were killed after these steps can be compared, too.

    `names` maps names in the first run to names in the second, with ``*`` for any text. If names differ only by a wrapper in one
    run, such as ``module.``, the wrapper is ignored. Fused and transposed tensors need ``record(..., names=...)``.

    Raises `UsageError` if a folder is not a complete trace, or if the runs have no tensor or no step in common. Also raises it if
    a moved run has other tensors or steps than the first run, or if `names` does not fit the runs.
    """
    return compare_everything(one, other, moved=moved, steps=steps, names=names).verdict


@rare_collections()  # a trace has many objects and no garbage
def compare_everything(
    one: str | Path,
    other: str | Path,
    *,
    moved: Sequence[str | Path] = (),
    steps: int | None = None,
    names: Names | None = None,
) -> Comparison:
    """Compare two runs, and return all compared values.

    `compare` returns only the verdict on them. Arguments and errors are those of `compare`.
    """
    first = read_run(Path(one), "A", steps)
    ranks, unwrapped = match_names(first.ranks, read_trace(Path(other)), require_names(names))
    second = run_of(Path(other), ranks, "B", steps)
    shared = _shared_steps(first, second)
    noisy = tuple(run_of(Path(folder), match_names(first.ranks, read_trace(Path(folder)))[0], steps=steps) for folder in moved)
    for run in noisy:
        require_like_first(first, run, shared)
    first, second, noisy, notes = match_copies(first, second, noisy)
    tolerance = Tolerance(first=first, moved=noisy)
    facts = Facts(
        first=first,
        second=second,
        steps=shared,
        settings=other_settings(first, second, shared),
        samples={step: compare_samples(first, second, step) for step in shared},
        losses={step: compare_losses(first, second, step, tolerance) for step in shared},
    )
    tensors = [*compare_tensors([key for key in keys_of(first, second) if key[0] in shared], first, second, tolerance)]
    last = next((each.step for each in tensors if each.is_different), shared[-1])
    clues = [clue for step in shared if step <= last for clue in _clues(facts, step, tolerance)]
    order = list(Moment)
    compared = tuple(sorted([*tensors, *clues], key=lambda each: (each.step, order.index(each.moment))))
    verdict = _verdict(facts, compared, tolerance)
    verdict = replace(verdict, notes=(*verdict.notes, *unwrapped, *notes))
    return Comparison(facts=facts, tolerance=tolerance, tensors=compared, verdict=verdict)


def _shared_steps(first: RecordedRun, second: RecordedRun) -> list[int]:
    both = f"folders {first.folder} and {second.folder} are not valid together"
    shared = sorted({*first.steps} & {*second.steps})
    if not shared:
        raise UsageError(f"{both}: they have no step in common. Expected runs recorded with the same `from_step`.")
    names = [[name for _, moment, name in run.tensors if moment in (Moment.GRADIENT, Moment.UPDATE)] for run in (first, second)]
    if all(names) and not {*names[0]} & {*names[1]}:
        raise UsageError(
            f"{both}: the first has {names[0][0]}, the second {names[1][0]}, and no tensor is in both. Expected two runs of one "
            "model."
        )
    return shared


def _clues(facts: Facts, step: int, tolerance: Tolerance) -> Iterator[TensorDifference]:
    """Compare samples, outputs, loss and norm of a step."""
    samples, losses = facts.samples[step], facts.losses[step]
    if samples is not None:
        found = TensorDifference(step=step, moment=Moment.SAMPLES, tensor="samples", difference=Difference.VALUE)
        yield replace(found, distance=float(bool(samples.difference)), detail=samples.difference)
    yield from compare_outputs(facts.first, facts.second, step, tolerance)
    if losses is not None:
        yield losses.difference
    yield from compare_norms(facts.first, facts.second, step, tolerance)


def _explains(clue: TensorDifference, facts: Facts, divergent: int | None) -> bool:
    """Whether a clue belongs to the first step at which gradients, parameters or state differ."""
    if clue.step != divergent:
        return False
    if clue.moment is not Moment.SAMPLES:
        return True
    # If gradients agreed with such samples in an earlier step, only the form of the samples differs.
    found = [facts.samples[step] for step in facts.steps if step <= clue.step]
    *before, own = [samples for samples in found if samples is not None]
    return not own.has_other_form and not any(samples.difference for samples in before)


def _verdict(facts: Facts, compared: Sequence[TensorDifference], tolerance: Tolerance) -> TraceVerdict:
    wrong = [each for each in compared if each.is_different]
    divergent = next((each.step for each in wrong if each.moment not in CLUES), None)
    differences = tuple(each for each in wrong if each.moment not in CLUES or _explains(each, facts, divergent))
    gaps = [*gaps_of(facts, tolerance)]
    outcome, first = judge(
        differences,
        gaps,
        is_measured=bool(tolerance.moved),
        first_step=facts.steps[0],
        output_eps=max(run.output_eps for run in facts.runs),
    )
    groups = groups_of(compared, differences)
    errors = [each.error for each in compared if each.difference is Difference.VALUE and each.moment not in CLUES]
    worst = max(errors, default=0.0)
    if first is None:
        reason = gaps[0][0] if gaps else f"the largest error is {worst:.2g} of its tolerance"
    else:
        reason = headline(first, differences, groups, facts)
    diagnosis = find_cause(facts.first, facts.second, differences, tolerance) if outcome is Outcome.DIVERGED else None
    return TraceVerdict(
        outcome=outcome,
        reason=reason,
        runs=(facts.first.describe(), facts.second.describe()),
        first=first,
        where="" if first is None else agreeing(compared, first, facts),
        diagnosis=diagnosis,
        hint="" if diagnosis is not None else hint_for(outcome, first, gaps, facts),
        differences=differences,
        groups=groups,
        worst_error=worst,
        notes=tuple(note for note in notes_of(facts, compared, differences) if note not in {reason, *dict(gaps)}),
        gaps=tuple(gap for gap, _ in gaps),
        coverage=tuple(coverage_of(facts, compared)),
    )
