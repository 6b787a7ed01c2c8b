"""Mistakes with running averages (EMA), in the model or elsewhere: updated at wrong times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import name_ranks, tensors
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import TensorsByName, full_tensors_of

FIT = 1e-6
"""Largest distance from a running average, relative to its change in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """A running average of a parameter: each update moves it towards the parameter by a constant fraction of the distance."""

    source: str
    """Name of the parameter."""
    share: float
    """The share by which it moves, above 0 and at most 1. This is one minus the decay."""


def wrong_averages(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in updates of running averages.

    Examples: averages are updated after each microbatch, before the optimizer's update, several times in a step, or never.
    """
    averages = _averages(diverged)
    if not averages:
        return
    subject = _subject(averages)
    for before, after, words in _ways(diverged, facts.num_backward):
        change = partial(_move, averages=averages, before=before, after=after)
        yield Mistake(Cause.AVERAGE_OF_WEIGHTS, f"{subject} {words}", change, is_quick=True)


def _subject(averages: Mapping[str, Average]) -> str:
    one = len(averages) == 1
    return f"the running average{'' if one else 's'} {tensors(tuple(averages))} {'is' if one else 'are'}"


def _ways(diverged: DivergedTraining, num_backward: int) -> list[tuple[int, int, str]]:
    """How often an average moves towards the old and the new parameter in a step, with words."""
    ways = [(1, 0, "updated before the optimizer's update, not after it"), (0, 0, "never updated")]
    counts = dict.fromkeys((num_backward, *diverged.counts, 2))
    for count in (count for count in counts if count > 1):
        each = "after each microbatch, not after each update" if count == num_backward else f"{count} times per step"
        ways += [(count - 1, 1, f"updated {each}"), (0, count, f"updated {count} times after each update")]
    return ways


def wrong_averages_outside(diverged: DivergedTraining) -> list[Diagnosis]:
    """Explain why running averages outside the model are wrong.

    Empty if no single mistake reproduces their values at all steps.
    """
    names = tuple(dict.fromkeys(each.tensor for each in diverged.divergences))
    if any(each.phase is not Phase.REPORTED for each in diverged.divergences):
        return []
    averages = _found_averages(diverged, names, Phase.REPORTED)
    ways = [(0, 1, ""), *_ways(diverged, diverged.num_microbatches)] if averages else []
    made = {words: _averaged(diverged, averages, before, after) for before, after, words in ways}
    found = [
        next((words for words, each in made.items() if _has(diverged, rank, each)), None) for rank in range(diverged.num_ranks)
    ]
    wrong = {words for words in found if words}
    if None in found or len(wrong) != 1:
        return []
    ranks = [rank for rank, words in enumerate(found) if words]
    where = "" if len(ranks) == len(found) else f" on {name_ranks(ranks)}"
    return [Diagnosis(cause=Cause.AVERAGE_OF_WEIGHTS, sentence=f"{_subject(averages)} {wrong.pop()}{where}", exact=True)]


def _averaged(diverged: DivergedTraining, averages: Mapping[str, Average], before: int, after: int) -> list[TensorsByName]:
    """Averages after each step if they move `before` times towards the old parameter, and `after` times to the new one."""
    values: list[TensorsByName] = [{} for _ in range(diverged.num_steps)]
    for name, average in averages.items():
        old, share = diverged.right_initial_values[average.source], average.share
        right = diverged.expected_values(0, Phase.REPORTED)[name]
        value = (right - share * diverged.expected_values(0, Phase.UPDATE)[average.source]) / (1 - share)
        for step in range(diverged.num_steps):
            new = diverged.expected_values(step, Phase.UPDATE)[average.source]
            for target in (*[old] * before, *[new] * after):
                value = value + share * (target - value)
            values[step][name], old = value, new
    return values


def _has(diverged: DivergedTraining, rank: int, made: Sequence[TensorsByName]) -> bool:
    """Whether a rank reports these values at all steps."""
    reported = [step.reported for step in diverged.traces[rank].steps]
    found = [{} if each is None else full_tensors_of(each) for each in reported]
    return all(
        name in own and own[name].shape == value.shape and np.allclose(own[name], value, rtol=FIT, atol=FIT * np.abs(value).max())
        for own, each in zip(found, made, strict=True)
        for name, value in each.items()
    )


def _averages(diverged: DivergedTraining) -> dict[str, Average]:
    """Return the first tensors that differ, if each is a running average of a parameter on one device."""
    names = diverged.differing(diverged.first.phase)
    if any(name in diverged.updated for name in names):
        return {}
    return _found_averages(diverged, names, Phase.BUFFER)


def _found_averages(diverged: DivergedTraining, names: Sequence[str], phase: Phase) -> dict[str, Average]:
    """Return the averages with these names in one phase; empty if any tensor is no average."""
    steps = [
        diverged.expected_values(step, Phase.UPDATE) | diverged.expected_values(step, phase) for step in range(diverged.num_steps)
    ]
    found = {name: _average(steps, name, diverged.updated) for name in names}
    return {name: average for name, average in found.items() if average is not None} if all(found.values()) else {}


def _average(steps: list[TensorsByName], name: str, sources: tuple[str, ...]) -> Average | None:
    """Find the parameter that a tensor averages, and the share. Parameters with the same last name come first."""
    own, kept = name.partition("/")[0], name.rpartition(".")[2]
    for source in sorted(sources, key=lambda source: source != own and not source.endswith(kept)):
        average = _follows([(each[name], each[source]) for each in steps if name in each and source in each])
        if average is not None:
            return Average(source=source, share=average)
    return None


def _follows(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """The constant share by which the first tensor in each pair moves towards the second; None if the share is not constant."""
    if any(average.shape != parameter.shape for average, parameter in pairs) or len(pairs) < 2:
        return None
    moves = np.concatenate([(new - old).reshape(-1) for (old, _), (new, _) in itertools.pairwise(pairs)])
    ways = np.concatenate([(parameter - old).reshape(-1) for (old, _), (_, parameter) in itertools.pairwise(pairs)])
    if not moves.any() or not ways.any():
        return None
    share = float(moves @ ways / (ways @ ways))
    is_right = np.linalg.norm(moves - share * ways) <= FIT * np.linalg.norm(moves)
    return share if is_right and 0.0 < share <= 1.0 else None


def _move(ranks: EmulatedUserRanks, *, averages: Mapping[str, Average], before: int, after: int) -> None:
    """Move each average `before` times towards the old parameter in a step, then `after` times towards the new one."""
    own = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in ranks.models]
    old: list[dict[str, torch.Tensor]] = [{} for _ in own]

    def keep(rank: int, _step: int) -> None:
        old[rank] = {name: own[rank][name].detach().clone() for each in averages.items() for name in (each[0], each[1].source)}

    def move(rank: int) -> None:
        with torch.no_grad():
            for name, average in averages.items():
                value = old[rank][name]
                for target, count in ((old[rank][average.source], before), (own[rank][average.source], after)):
                    for _ in range(count):
                        value = value.lerp(target.to(value.dtype), average.share)
                own[rank][name].copy_(value)

    ranks.before_step.append(keep)
    ranks.at_end.update({rank: partial(move, rank) for rank in range(len(own))})
