"""Mistakes in gradient clipping, recognized by the clipped gradients and by the returned norm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from equivcheck.diagnosis.catalogue.counterfactual import Change, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks, norm_of
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.mistakes.clipping import local_norm, wrong_clippings
from equivcheck.diagnosis.words import gradients, tensors
from equivcheck.layouts.base.rounding import EACH, ONCE, WhenReduced
from equivcheck.layouts.parallelisms.pipeline.stages import weights_of_several_ranks
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ClipNorm, ClipValue, Pipeline
from equivcheck.scenario.mesh import PP
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.differences import Phase

MAX_SETS = 4096
"""Maximum tensor subsets whose norms are tried."""


def wrong_clippings_of_scenario(diverged: DivergedRun, facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in gradient clipping.

    A mistake with a wrong norm is tried in two variants. Both clip by the wrong norm. The first variant also returns it, and the
    second returns the right norm.
    """
    clipping = diverged.training.clipping
    if isinstance(clipping, ClipValue):
        change = _with_clipping(ClipValue(clip_value=1e300))
        yield on_one_device(Cause.NOT_CLIPPED, "gradients are not clipped", change)
    if isinstance(clipping, ClipNorm):
        for mistake in wrong_clippings(diverged, facts):
            if mistake.cause is not Cause.CLIPPED_BEFORE_REDUCTION:
                yield mistake
                if mistake.cause is not Cause.NOT_CLIPPED:
                    yield _returning_total(mistake)
        yield from _norms_of_some_tensors(diverged, clipping)
        yield from _norms_of_stages(diverged)
    if clipping is not None and diverged.has_own_rows:
        words = "each rank clips the gradients of its own rows before they are reduced"
        # Clipping again after one reduction would change nothing: the mean of clipped gradients is no larger.
        for again, when in ((False, ONCE), (False, EACH), (True, EACH)):
            change = partial(_clip_early, clipping=clipping, again=again, when=when)
            more = ", and again afterwards" if again else ""
            yield Mistake(Cause.CLIPPED_BEFORE_REDUCTION, words + more, change, own_rows=True)


def _with_clipping(clipping: ClipValue) -> Change:
    def change(setup: Setup) -> None:
        setup.training = replace(setup.training, clipping=clipping)

    return change


def _returning_total(mistake: Mistake) -> Mistake:
    def change(ranks: EmulatedRanks) -> None:
        mistake.change(ranks)
        ranks.returns_total = True

    return replace(mistake, sentence=f"{mistake.sentence}, but the total norm is returned", change=change)


def _norms_of_stages(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield a mistake: each rank clips by the norm over its stages. If stages share a weight, only its first rank counts it."""
    for pipeline in diverged.layout.of(Pipeline):
        shared = weights_of_several_ranks(diverged.training.model, pipeline, diverged.mesh.size(PP))
        first_ranks = {weight.name: weight.first_rank for weight in shared if weight.trained}
        if first_ranks:
            words = "each rank clips by the norm over its own stages, and only the first rank with a shared weight counts it"
            change = partial(_clip_stages, axes=[name for name in diverged.wide_axes if name != PP], first_ranks=first_ranks)
            mistake = Mistake(Cause.LOCAL_NORM, words, change, scales_gradients=True)
            yield from (mistake, _returning_total(mistake))


def _clip_stages(ranks: EmulatedRanks, *, axes: Sequence[str], first_ranks: Mapping[str, int]) -> None:
    def norm(rank: int, gradients: Gradients, kind: float) -> torch.Tensor:
        place = ranks.coordinates[rank].indices[PP]
        counted = {name: value for name, value in gradients.items() if first_ranks.get(name, place) == place}
        return local_norm(ranks, rank, counted, kind, axes=axes)

    ranks.norm = norm


def _norms_of_some_tensors(diverged: DivergedRun, clipping: ClipNorm) -> Iterator[Mistake]:
    for names in _tensor_subsets(diverged, clipping):
        missing = [name for name in diverged.updated if name not in names]
        words = f"the total norm leaves out {tensors(missing)}" if names else "the total norm is 0, as if there were no gradients"
        for only in (None, names):
            more = "" if only is None else f", and {'they are' if len(missing) > 1 else 'it is'} not clipped"
            change = partial(_clip_by_some, names=names, only=only)
            mistake = Mistake(Cause.PART_OF_NORM, words + more, change, is_quick=True)
            yield from (mistake, _returning_total(mistake))


def _clip_by_some(ranks: EmulatedRanks, *, names: Collection[str], only: Collection[str] | None) -> None:
    """Clip by the norm of some gradients. `only` names the gradients to clip (None for all)."""
    kept: dict[int, Gradients] = {}
    ranks.norm = lambda _rank, gradients, kind: norm_of([each for name, each in gradients.items() if name in names], kind)

    def keep(rank: int, _step: int) -> None:
        kept[rank] = {name: each.clone() for name, each in ranks.gradients(rank).items() if only and name not in only}

    def restore(rank: int, _step: int) -> None:
        for name, value in kept[rank].items():
            ranks.parameters[rank][name].grad = value

    if only is not None:
        ranks.after_backward.append(keep)
        ranks.after_clipping.append(restore)


def _tensor_subsets(diverged: DivergedRun, clipping: ClipNorm) -> list[tuple[str, ...]]:
    """Return the tensor subsets whose norm is a norm by which the ranks must have clipped."""
    gradients = diverged.expected_values(diverged.first.step, Phase.GRADIENT)
    names = [name for name in diverged.updated if name in gradients and gradients[name].any()]
    order = float(clipping.norm_type.value)
    sizes = np.array([np.linalg.norm(gradients[name].reshape(-1), order) for name in names])
    implied = _implied_norms(diverged, clipping)
    if 2 ** len(names) > MAX_SETS or not implied:
        return []
    found = []
    for mask in range(2 ** len(names) - 1):
        chosen = np.array([bool(mask >> at & 1) for at in range(len(names))])
        norm = np.linalg.norm(sizes[chosen], order) if chosen.any() else 0.0
        if any(np.isclose(norm, each, rtol=1e-6, atol=0.0) for each in implied):
            found.append(tuple(name for name, taken in zip(names, chosen, strict=True) if taken))
    return sorted(found, key=len, reverse=True)[:4]


def _implied_norms(diverged: DivergedRun, clipping: ClipNorm) -> list[float]:
    """Return norms in the first diverged step: the returned norm, and norms following from scaled gradients."""
    found = diverged.found_values(diverged.first.step, Phase.CLIPPING)
    implied = [float(found["norm"])] if "norm" in found else []
    gradients = diverged.found_values(diverged.first.step, Phase.GRADIENT)
    for name, values in found.items():
        before = gradients.get(name)
        if before is not None and before.any():
            at = np.unravel_index(np.argmax(np.abs(before)), before.shape)
            if values[at] and abs(values[at]) < abs(before[at]):
                implied.append(clipping.max_norm * float(before[at] / values[at]) - 1e-6)
    return implied


def _clip_early(ranks: EmulatedRanks, *, clipping: ClipNorm | ClipValue, again: bool, when: WhenReduced) -> None:
    def clip_one(gradients: Gradients) -> Gradients:
        holders = {name: torch.empty_like(value) for name, value in gradients.items()}
        for name, holder in holders.items():
            holder.grad = gradients[name].clone()
        if isinstance(clipping, ClipNorm):
            nn.utils.clip_grad_norm_(holders.values(), clipping.max_norm, float(clipping.norm_type.value))
        else:
            nn.utils.clip_grad_value_(holders.values(), clipping.clip_value)
        return {name: holder.grad for name, holder in holders.items() if holder.grad is not None}

    ranks.when, ranks.reduce = when, lambda all_, microbatch, step: ranks.mean(list(map(clip_one, all_)), microbatch, step)
    if not again:
        ranks.norm, ranks.returns_total = lambda *_: torch.zeros((), dtype=torch.float64), True


def unscaled_after_clipping(diverged: DivergedRun, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a mistake: gradients are clipped before they are unscaled.

    The gradient scale is taken from the first divergence: the ratio between wrong and right gradients. Yields none if the ratio
    is not constant.
    """
    names = tuple(name for name in diverged.differing(Phase.GRADIENT) if name in diverged.updated)
    ratio = diverged.ratio(names, Phase.GRADIENT) if names else None
    if ratio is None:
        return
    for chosen in dict.fromkeys((names, diverged.updated)):
        words = f"{gradients(diverged, chosen)} {ratio:g} times as large as on one device, and unscaled only after clipping"
        yield Mistake(Cause.NOT_UNSCALED, words, partial(_scale_until_clipped, names=chosen, ratio=ratio), is_quick=True)


def _scale_until_clipped(ranks: EmulatedRanks, *, names: Sequence[str], ratio: float) -> None:
    def scale(rank: int, factor: float) -> None:
        for name, gradient in ranks.gradients(rank).items():
            if name in names:
                gradient.mul_(factor)

    ranks.after_backward.append(lambda rank, _step: scale(rank, ratio))
    ranks.before_update.append(lambda rank, _step: scale(rank, 1 / ratio))
