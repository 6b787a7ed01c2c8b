"""Runs `check_batching`, and decides about its outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from equivcheck.arrangements.arrangement import Arrangement, Kind, arrangements
from equivcheck.arrangements.distributions import distributions
from equivcheck.arrangements.fields import Role, unsplit_lists
from equivcheck.arrangements.format import Format
from equivcheck.batching.by_output import fits_by_output
from equivcheck.batching.causes import cause_of
from equivcheck.batching.evaluation import cause_of_evaluation, evaluations
from equivcheck.batching.normalisers import (
    NORMALISERS,
    Normaliser,
    Over,
    Unit,
    candidates,
    fits,
    fits_within_example,
    measured_weights,
)
from equivcheck.batching.ranks import RankRuns
from equivcheck.batching.runs import COMPARED, Runs
from equivcheck.batching.scale import constant_factor
from equivcheck.batching.step import Step
from equivcheck.batching.usage import API, invalid
from equivcheck.batching.verdict import ArrangementResult, BatchingVerdict
from equivcheck.errors import UsageError
from equivcheck.oracle.verdict.description import shorten_to_line
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.tally import record_check
from equivcheck.user.messages.no_update import NO_STEP
from equivcheck.user.usage import named_in_errors
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.state.keeper import StateKeeper, preserved_state
from equivcheck.worlds.trace.differences import Difference, Phase


def check_step(step: Step) -> BatchingVerdict:
    """Train the step on all arrangements and compare them, as `check_batching` does."""
    started = time.perf_counter()
    with preserved_state(StateKeeper()), named_in_errors(API):
        verdict = _checked(step)
    record_check(API, verdict.world, verdict.outcome.value)
    return replace(verdict, seconds=time.perf_counter() - started)


def _checked(step: Step) -> BatchingVerdict:
    given, examples = step.taken_apart()
    if len(examples) < 2:
        raise invalid("batch", "it has one row", "at least two rows, so that they can be split")
    ranks = step.ranks()
    runs = Runs(step.task(), given, examples, ranks)
    empty = _verdict(step, runs, given, ranks)
    if runs.reference.doubt is not None:
        return replace(empty, outcome=Outcome.INCONCLUSIVE, reason=runs.reference.doubt.reason)
    shown = list(arrangements(given, examples, step.constraints))
    if ranks is not None:
        shown += distributions(given, examples, step.constraints, ranks.task.num_data_ranks)
    results = [_result(runs, each, step) for each in shown]
    if step.evaluate is not None:
        results += evaluations(step.evaluate, step.task(), given, runs.whole, shown)
    worst = max((result.error for result in results), default=0.0)
    return _judged(replace(empty, results=tuple(results), worst_error=worst), runs, given, step, shown)


def _verdict(step: Step, runs: Runs, given: Format, ranks: RankRuns | None) -> BatchingVerdict:
    """Return the verdict as it is before any arrangement is compared."""
    return BatchingVerdict(
        outcome=Outcome.EQUIVALENT,
        world="one device" if ranks is None else ranks.world_name,
        mesh=() if ranks is None else ranks.task.mesh,
        name=step.name,
        counts=tuple(example.num_counted for example in runs.examples),
        precision=str(runs.precision).removeprefix("torch."),
        read=tuple(_read(given)),
        notes=tuple(_notes(runs, given, ranks)),
    )


def _notes(runs: Runs, given: Format, ranks: RankRuns | None) -> Iterator[str]:
    for name in unsplit_lists(given.batch, given.fields):
        yield f"batch {name!r} has no tensors, so every arrangement gets it unchanged"
    if ranks is not None and len(runs.examples) < ranks.task.num_data_ranks:
        yield f"{len(runs.examples)} examples are too few for {ranks.task.num_data_ranks} data ranks, so they are not split"


def _result(runs: Runs, arrangement: Arrangement, step: Step) -> ArrangementResult:
    """Compare an arrangement with the whole batch.

    A batch twice may have twice the gradients if sums are allowed. A term that rows of a microbatch share is always a mean.
    """
    result = ArrangementResult(name=arrangement.name, kind=arrangement.kind)
    if arrangement.kind is not Kind.TWICE:
        # Ranks may return the loss of their own rows.
        phases = COMPARED if not arrangement.ranks else (Phase.GRADIENT, Phase.UPDATE)
        return _compared(runs, result, arrangement, phases, 1.0)
    times = float(len(arrangement.ranks) or 2)
    factors = {None: (1.0,) if step.microbatch_loss else (1.0, times), "none": (times,)}.get(step.normaliser, (1.0,))
    found = [_compared(runs, result, arrangement, (Phase.GRADIENT,), factor) for factor in factors]
    return next((each for each in found if each.divergence is None), found[0])


def _compared(
    runs: Runs, result: ArrangementResult, arrangement: Arrangement, phases: Sequence[Phase], factor: float
) -> ArrangementResult:
    try:
        found = runs.compare(arrangement, phases, factor=factor)
    except UsageError:
        raise
    except RanksFailed as error:
        failure = error.failure
        return replace(result, error=math.inf, failure=shorten_to_line(failure.summary), is_hung=failure.hung)
    except Exception as error:
        return replace(result, error=math.inf, failure=shorten_to_line(f"{type(error).__name__}: {error}"))
    if not found.divergences:
        return replace(result, error=found.worst_error)
    # A logged loss matters less than a gradient.
    first = min(found.divergences, key=lambda each: (each.phase is Phase.LOSS, each.phase is Phase.UPDATE))
    return replace(result, error=found.worst_error, divergence=first, ratio=runs.ratio(arrangement, first))


def _judged(verdict: BatchingVerdict, runs: Runs, given: Format, step: Step, shown: Sequence[Arrangement]) -> BatchingVerdict:
    declared = None if step.normaliser is None or step.microbatch_loss else NORMALISERS[step.normaliser]
    first = next((result for result in verdict.results if result.divergence is not None), None)
    failed = next((result for result in verdict.results if result.failure), None)
    if first is None and failed is not None:
        outcome = Outcome.HUNG if failed.is_hung else Outcome.CRASHED
        return replace(verdict, outcome=outcome, reason=f"{failed.name}: {failed.failure}")
    if first is None:
        fitting = _fitting(runs, step)
        if declared is None or _fits_declared(runs, given, declared, fitting, step.window):
            agreeing = _agreeing(verdict, runs, given, declared, fitting)
            return agreeing if declared is None else _scaled(agreeing, runs, given, declared, step.window)
        verdict = replace(
            verdict,
            outcome=Outcome.DIVERGED,
            reason=f"the whole batch is not the declared {declared.words(is_sum=runs.is_additive)}",
        )
    elif runs.narrows and all(map(_may_overflow, verdict.results)):
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=f"arrangement {first.name!r} has NaN, but {_OVERFLOW}")
    else:
        reason = f"arrangement {first.name!r} differs from the whole batch"
        verdict = replace(verdict, outcome=Outcome.DIVERGED, reason=reason, divergence=first.divergence)
    return _explained(verdict, runs, given, step, shown) if step.explain else verdict


def _fits_declared(runs: Runs, given: Format, declared: Normaliser, fitting: Sequence[Normaliser], window: int | None) -> bool:
    """Whether the whole batch has the declared normaliser.

    If several outputs exist, such as two heads, each may have its own counts.
    """
    if declared in fitting or (_may_count_first(given, declared) and _MASKED in fitting):
        return True
    return fits_by_output(runs, declared, window)


def _scaled(verdict: BatchingVerdict, runs: Runs, given: Format, declared: Normaliser, window: int | None) -> BatchingVerdict:
    """Return the verdict, changed to DIVERGED if all gradients have a constant factor."""
    factor = constant_factor(runs, given, declared, window)
    if runs.is_one(factor):
        return verdict
    by = f", which is 1 / window ({window})" if window is not None and runs.is_one(factor * window) else ""
    reason = f"in every arrangement, gradients are {factor:.6g} times those of the declared {declared}{by}"
    return replace(verdict, outcome=Outcome.DIVERGED, reason=reason, cause=f"a constant factor {factor:.6g}{by}")


_MASKED = Normaliser(unit=Unit.LABELS, over=Over.ALL)


def _may_count_first(given: Format, declared: Normaliser) -> bool:
    """Whether a mean over tokens may count the first position: without labels, the loss mask may be shifted or not."""
    has_mask_only = given.field_with(Role.LABELS) is None and given.field_with(Role.LOSS_MASK) is not None
    return has_mask_only and declared == NORMALISERS["token"]


def _explained(verdict: BatchingVerdict, runs: Runs, given: Format, step: Step, shown: Sequence[Arrangement]) -> BatchingVerdict:
    """Add the cause, and the examples' weights, to the verdict."""
    wrong = [each for each, result in zip(shown, verdict.results, strict=False) if result.divergence is not None]
    if not wrong and verdict.divergence is not None:
        assert step.evaluate is not None
        return replace(verdict, cause=cause_of_evaluation(step.evaluate, step.task(), given, shown))
    right = [each for each, result in zip(shown, verdict.results, strict=False) if not result.failure]
    verdict = replace(verdict, cause=cause_of(runs, given, step.window, right, wrong))
    divergence = verdict.divergence
    if divergence is not None and (divergence.difference is Difference.RANKS_DISAGREE or divergence.phase is Phase.LOSS):
        return verdict  # each rank weighs examples in its own way; weights of gradients do not explain a loss
    declared = None if step.normaliser is None else NORMALISERS[step.normaliser]
    return replace(verdict, weights=_weights(runs, wrong[0] if wrong else runs.whole, declared))


_OVERFLOW = (
    "your model casts to a type with fewer digits, in which attention masks of a wider type overflow. Pass keep_dtype=True, or "
    "dtype= with the type that your model casts to"
)


def _may_overflow(result: ArrangementResult) -> bool:
    """Whether an arrangement agrees, or has NaN that may come from padding alone."""
    if result.divergence is None:
        return not result.failure
    return result.divergence.difference is Difference.NAN and result.kind in (Kind.PADDED, Kind.PACKED)


def _fitting(runs: Runs, step: Step) -> list[Normaliser]:
    """Return the normalisers that predict the whole batch from single examples."""
    if step.microbatch_loss:
        return []
    window = step.window
    return [
        each for each in candidates(window) if fits(each, runs, runs.whole, window) and fits_within_example(each, runs, window)
    ]


def _agreeing(
    verdict: BatchingVerdict, runs: Runs, given: Format, declared: Normaliser | None, fitting: Sequence[Normaliser]
) -> BatchingVerdict:
    if not verdict.results:
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason="no other arrangement of the batch is allowed")
    if runs.is_without_update(runs.whole):
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=NO_STEP)
    counts = {number for number in verdict.counts if number}
    # The user's own examples have unknown tokens, so nothing else than a mean over examples can be declared.
    has_tokens = given.has_tokens or (not given.fields and declared is not NORMALISERS["sequence"])
    is_ambiguous = has_tokens and len(counts) == 1 and declared is not NORMALISERS["none"]
    if declared is not None and is_ambiguous:
        reason = f"all examples have {counts.pop()} counted tokens, so normalisers other than the {declared} fit as well"
        return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=reason)
    if not fitting:
        return verdict
    also = ", or another mean, because counts are equal" if is_ambiguous else ""
    return replace(verdict, normaliser=f"{fitting[0].words(is_sum=runs.is_additive)}{also}")


def _weights(runs: Runs, arrangement: Arrangement, declared: Normaliser | None) -> str:
    """Return each example's weight, as a clause, in an arrangement and in the whole batch.

    Empty if weights do not explain both.
    """
    found, expected = measured_weights(runs, arrangement), measured_weights(runs, runs.whole)
    if found is None or expected is None or not np.isfinite([found, expected]).all():
        return ""
    if arrangement is runs.whole and declared is not None:
        expected = declared.shares(runs, runs.whole, None)
    return f"examples weigh {_numbers(found)} instead of {_numbers(expected)}"


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:.3f}" if math.isfinite(value) else str(value) for value in values)


def _read(given: Format) -> Iterator[str]:
    if not given.fields:
        yield "examples by your function"
    for field in given.fields:
        words = field.role.value
        if field.role is Role.LABELS:
            shifted = "shifted by the model" if given.is_shifted_by_model else "shifted already"
            words = f"labels ({shifted}, {given.ignore_index} ignored)"
        if field.role is Role.MASK:
            words = f"mask (padded {given.default_side.value})"
        yield f"{field.name or 'batch'}: {words}" if field.name != field.role.value else words
