"""`explained`: add a diagnosis to a finding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from equivcheck.diagnosis.agreement import differs_in_first_tensor, num_agreeing_moments
from equivcheck.diagnosis.catalogue.candidates import candidates, facts_of
from equivcheck.diagnosis.diverged_run import DivergedRun, run_again
from equivcheck.diagnosis.drift import drift_of
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.failures import diagnosis_of_failure
from equivcheck.diagnosis.mistake import FACTORS, Mistake
from equivcheck.diagnosis.mistakes.precision import narrower_types
from equivcheck.diagnosis.patterns import pattern_of
from equivcheck.errors import EquivCheckError, UsageError
from equivcheck.layouts.base.limits.repairs import each_layer, has_ties, without_ties
from equivcheck.layouts.composition.limits import why_unsupported
from equivcheck.layouts.composition.running import single_process_world, world_for
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.oracle.verdict.verdict import CaseVerdict, Outcome, Verdict
from equivcheck.scenario import Scenario
from equivcheck.training.setup import Setup
from equivcheck.training.threads import one_thread
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.trace.differences import Difference, Phase
from equivcheck.worlds.work_clock import WorkClock

V = TypeVar("V", bound=CaseVerdict)
LONGEST_SECONDS = 120.0
"""Time limit in seconds for trying candidates. A shrunk scenario takes less than a second, most other scenarios a few seconds."""


def explained(
    verdict: V,
    *,
    alter: Callable[[Setup], None] | None = None,
    world: str | Ranks = "sim",
    deadline: float = 60.0,
) -> V:
    """Return the verdict with a diagnosis, if a cause is found, and with the steps that go wrong.

    The scenario's ranks run again in `world`. If they then agree with one device, they run in the verdict's world, or in gloo if
    that is torchrun. `alter` must be the function with which the verdict was found. `deadline` is in seconds per run. Verdicts
    without a finding and verdicts on tensor programs are returned unchanged. An error during the diagnosis is kept in
    `unfinished`. Raises `UsageError` for a verdict from `check_training`.
    """
    if not isinstance(verdict, CaseVerdict):
        raise UsageError(
            f"verdict {type(verdict).__name__} is not valid: only causes for scenarios can be searched. Expected a verdict from "
            "check(). For your own training, verdict.describe() shows all findings"
        )
    try:
        if isinstance(verdict, Verdict):
            return _explained(verdict, alter, world, deadline)  # type: ignore[return-value] # of its own class
        return verdict
    except Exception as error:
        return verdict.with_unfinished("diagnosis", error)


def _explained(verdict: Verdict, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float) -> Verdict:
    if verdict.failure is not None and verdict.outcome.is_finding:
        return replace(verdict, diagnosis=diagnosis_of_failure(verdict.failure))
    if verdict.outcome is not Outcome.DIVERGED:
        return verdict
    if verdict.divergence is not None and verdict.divergence.difference is Difference.FULL_TENSOR:
        return _of_right_values(verdict)
    for place in dict.fromkeys((world_for(verdict.scenario, world), single_process_world(verdict.world))):
        try:
            diverged = run_again(verdict.scenario, alter, place, deadline)
        except RanksFailed as error:
            return replace(verdict, drift=f"not reproduced: the ranks fail in a second run ({error})")
        if diverged is not None:
            types = () if diverged.rounding is not None else narrower_types(diverged)
            found = diagnosis_of(diverged) or cause_by_ablation(verdict.scenario, alter, place, deadline)
            found = found or pattern_of(diverged, types)
            return replace(verdict, diagnosis=found, drift=drift_of(diverged, alter, place, deadline))
    return _of_right_values(verdict)


def _of_right_values(verdict: Verdict) -> Verdict:
    """Return the verdict for a second run with right values.

    Name a wrong `full_tensor()` or communication, else say that none is wrong.
    """
    first = verdict.divergence
    if first is not None and first.difference is Difference.FULL_TENSOR:
        words = f"the shards of `{first.tensor}` are right, but DTensor's full_tensor() returns wrong values"
        return replace(verdict, diagnosis=Diagnosis(cause=Cause.READ_BY_TORCH, sentence=words, exact=False))
    if first is None or first.phase is not Phase.COMMUNICATION:
        return replace(verdict, drift="not reproduced: a second run matched")
    words = f"values match; communication does not: {first.tensor} is {first.actual}, not {first.expected}"
    return replace(verdict, diagnosis=Diagnosis(cause=Cause.COMMUNICATION, sentence=words, exact=False))


def diagnosis_of(diverged: DivergedRun) -> Diagnosis | None:
    """Search the mistake behind a diverged run, and return the diagnosis. None if no known mistake explains it."""
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits = _fits(diverged)
    exact = [candidate for candidate, count in fits if count == len(diverged.found)]
    if exact:
        named = (exact[0].cause, *FACTORS)
        also = next((other.sentence for other in exact if other.cause not in named), "")
        more = f" (the results fit another cause as well: {also})" if also else ""
        return Diagnosis(cause=exact[0].cause, sentence=exact[0].sentence + more, exact=True)
    if {found.tensor for found in diverged.divergences} == {"norm"}:
        first = diverged.first
        words = f"gradients are clipped correctly, but the norm returned is {first.actual}, not {first.expected}"
        return Diagnosis(cause=Cause.NORM_MISREPORTED, sentence=words, exact=True)
    if not fits:
        return None
    longest, _ = max(fits, key=lambda fit: fit[1])
    words = f"{longest.sentence} at step {diverged.first.step}; later differences have more causes"
    return Diagnosis(cause=longest.cause, sentence=words, exact=False)


def _fits(diverged: DivergedRun) -> list[tuple[Mistake, int]]:
    """Return candidates that fit until the first diverged step ends, each with its number of agreeing moments.

    The search ends when two causes explain everything. After the first cause, only quick candidates for other causes are tried.
    """
    step, num_steps, least = diverged.first.step, diverged.num_steps, diverged.num_moments
    found, causes = list[tuple[Mistake, int]](), set[Cause]()
    facts, emulate = facts_of(diverged), partial(ScenarioRanks, diverged)
    clock = WorkClock()
    for candidate in candidates(diverged):
        if clock.seconds > LONGEST_SECONDS or len(causes) > 1:
            break
        if causes and (not candidate.is_quick or candidate.cause in causes):
            continue
        try:
            # Most candidates differ in the first diverged step already, so the later steps need not run.
            if step + 1 < num_steps and num_agreeing_moments(diverged, candidate.run(emulate, step + 1, facts)) < least:
                continue
            traces = candidate.run(emulate, num_steps, facts)
            count = num_agreeing_moments(diverged, traces)
            is_fit = count >= least and differs_in_first_tensor(diverged, traces)
        except (EquivCheckError, RuntimeError, ArithmeticError):
            # Torch raises for some faults: clipping without gradients, or a division by a step count of zero.
            continue
        if is_fit:
            found.append((candidate, count))
            causes |= {candidate.cause} if count == len(diverged.found) else set()
    return found


def cause_by_ablation(
    scenario: Scenario, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float
) -> Diagnosis | None:
    """Run the ranks again without dropout, then without shared weights.

    If the ranks then agree with one device, return a diagnosis that names the removed part. Returns None if they still differ.
    """
    training, without = scenario.training, []
    if any(layer.dropout for layer in training.model.layers):
        plain = each_layer(training, lambda _, layer: layer.with_fields(dropout=0.0))
        words = "dropout masks differ from the single-device run: without dropout your ranks match it"
        without.append((plain, Cause.ANOTHER_MASK, words))
    if has_ties(training.model):
        words = "a shared weight is not shared on your ranks: with a separate weight for each use they match one device"
        without.append((without_ties(training), Cause.UNTIED, words))
    for plain, cause, words in without:
        plainer = replace(scenario, training=plain)
        try:
            if why_unsupported(plainer) is None and run_again(plainer, alter, world, deadline) is None:
                return Diagnosis(cause=cause, sentence=words, exact=False)
        except EquivCheckError:
            continue  # a plainer scenario whose ranks fail explains nothing
    return None
