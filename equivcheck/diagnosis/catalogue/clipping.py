"""Faults in gradient clipping: left out, by a wrong norm, or before the reduction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import torch
from torch import nn

from equivcheck.diagnosis.catalogue.counterfactual import Change, Counterfactual, on_emulated_ranks, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.coordinates import axis_combinations
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.emulation.held_elements import held_elements_of
from equivcheck.diagnosis.words import ranks_along, tensors
from equivcheck.layouts.base.rounding import EACH, ONCE, WhenReduced
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ClipNorm, ClipValue, NormType
from equivcheck.training.setup import Setup
from equivcheck.worlds.trace.differences import Phase

Norm = Callable[[Gradients, NormType], torch.Tensor]
"""Computes a norm from gradients by name."""
MAX_SETS = 4096
"""Maximum number of tensor subsets whose norms are tried."""
NOT_THE_NORM = "not the norm over all elements"


def norm_of(values: Iterable[torch.Tensor], kind: NormType) -> torch.Tensor:
    """Norm over all elements; 0 without tensors."""
    flat = [value.reshape(-1) for value in values if value.numel()]
    return torch.linalg.vector_norm(torch.cat(flat), float(kind.value)) if flat else torch.zeros((), dtype=torch.float64)


def scale_to(parameters: Iterable[torch.Tensor], clipping: ClipNorm, norm: torch.Tensor) -> None:
    """Scale gradients as `clip_grad_norm_` does for the given norm."""
    nn.utils.clip_grads_with_norm_(list(parameters), clipping.max_norm, norm)


def clip_nothing(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    """Return the norm without clipping."""
    return norm_of([parameter.grad for parameter in parameters if parameter.grad is not None], clipping.norm_type)


def clipping_by(norm: Norm, *, reports_whole: bool = False, only: Collection[str] | None = None) -> Change:
    """Clip by `norm` and return it, or the true norm with `reports_whole`. `only` names the gradients to clip (None for all)."""

    def change(setup: Setup) -> None:
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in setup.model.named_parameters()}

        def clip(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
            whole = clip_nothing(module, parameters, clipping)
            gradients = {names[parameter]: parameter.grad for parameter in parameters if parameter.grad is not None}
            other = norm(gradients, clipping.norm_type)
            scale_to([each for each in parameters if only is None or names[each] in only], clipping, other)
            return whole if reports_whole else other

        setup.clip_norm = clip

    return change


def wrong_norms(diverged: DivergedRun, clipping: ClipNorm) -> Iterator[Counterfactual]:
    """A local norm, replicas counted repeatedly, another norm type, summed norms, or a norm without some tensors."""
    yield from _local_norms(diverged)
    yield from _norms_with_replicas(diverged)
    yield from _other_norms(diverged, clipping)
    yield from _norms_of_some_tensors(diverged, clipping)


def _local_norms(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Norm over the elements held along some axes; without axes, over one rank's elements."""
    if not diverged.can_be_emulated:
        return
    axes = diverged.wide_axes
    for count in range(len(axes)):
        for kept in combinations(axes, count):
            words = "each rank clips by its local norm, over the elements that it holds"
            if kept:
                words = f"the norm is reduced over {ranks_along(diverged.mesh, kept)} only"
            for reported in (False, True):
                more = ", but returns the total norm" if reported else ""
                change = partial(_clip_by_local_norm, kept=kept, reported=reported)
                yield on_emulated_ranks(diverged, Cause.LOCAL_NORM, words + more, change)


def _clip_by_local_norm(ranks: EmulatedRanks, kept: tuple[str, ...], *, reported: bool) -> None:
    for rank, setup in zip(ranks.coordinates, ranks.setups, strict=True):
        clipping_by(_norm_held_by(ranks, ranks.peers(rank, kept)), reports_whole=reported)(setup)


def _norm_held_by(ranks: EmulatedRanks, holders: Sequence[int]) -> Norm:
    return lambda gradients, kind: norm_of([each[ranks.held.by(name, *holders)] for name, each in gradients.items()], kind)


def _norms_with_replicas(diverged: DivergedRun) -> Iterator[Counterfactual]:
    if diverged.resumes:
        return
    for chosen in axis_combinations(diverged.wide_axes):
        counts = held_elements_of(diverged).num_copies(chosen)
        if any(bool((each > 1).any()) for each in counts.values()):
            words = f"the total norm counts gradients replicated over {ranks_along(diverged.mesh, chosen)} once per rank"
            yield on_one_device(diverged, Cause.REPLICAS_IN_NORM, words, clipping_by(partial(_norm_counting, counts=counts)))


def _norm_counting(gradients: Gradients, kind: NormType, counts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    power = 1 / float(kind.value)
    return norm_of([each * counts[name].to(each.dtype) ** power for name, each in gradients.items()], kind)


def _other_norms(diverged: DivergedRun, clipping: ClipNorm) -> Iterator[Counterfactual]:
    for kind in NormType:
        if kind is not clipping.norm_type:
            words = f"gradients are clipped by their {kind.value}-norm, not by their {clipping.norm_type.value}-norm"
            change = with_clipping(replace(clipping, norm_type=kind))
            yield on_one_device(diverged, Cause.ANOTHER_NORM, words, change)
    words = f"the total norm is the sum of the tensors' norms, {NOT_THE_NORM}"
    yield on_one_device(diverged, Cause.ANOTHER_NORM, words, clipping_by(_sum_over_tensors))
    if diverged.can_be_emulated:
        words = f"the total norm is the sum of the ranks' local norms, {NOT_THE_NORM}"
        yield on_emulated_ranks(diverged, Cause.ANOTHER_NORM, words, _added_up_over_ranks)


def with_clipping(clipping: ClipNorm | ClipValue) -> Change:
    """Replace the training's clipping."""

    def change(setup: Setup) -> None:
        setup.training = replace(setup.training, clipping=clipping)

    return change


def _sum_over_tensors(gradients: Gradients, kind: NormType) -> torch.Tensor:
    return torch.stack([norm_of([each], kind) for each in gradients.values()]).sum()


def _added_up_over_ranks(ranks: EmulatedRanks) -> None:
    norms = [_norm_held_by(ranks, [rank.rank]) for rank in ranks.coordinates]
    for setup in ranks.setups:
        clipping_by(lambda gradients, kind: torch.stack([norm(gradients, kind) for norm in norms]).sum())(setup)


def _norms_of_some_tensors(diverged: DivergedRun, clipping: ClipNorm) -> Iterator[Counterfactual]:
    for names in _tensor_subsets(diverged, clipping):
        missing = [name for name in diverged.updated if name not in names]
        words = f"the total norm leaves out {tensors(missing)}" if names else "the total norm is 0, as if there were no gradients"
        for reported in (False, True):
            for only in (None, names):
                more = "" if only is None else f", and {'they are' if len(missing) > 1 else 'it is'} not clipped"
                change = clipping_by(_norm_over(names), reports_whole=reported, only=only)
                yield on_one_device(diverged, Cause.PART_OF_NORM, words + more, change)


def _norm_over(names: Collection[str]) -> Norm:
    return lambda gradients, kind: norm_of([each for name, each in gradients.items() if name in names], kind)


def _tensor_subsets(diverged: DivergedRun, clipping: ClipNorm) -> list[tuple[str, ...]]:
    """Tensor subsets whose norm is one by which the ranks must have clipped."""
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
    """Norms in the first diverged step: the one returned, and those that follow from scaled gradients."""
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


Clip = Callable[[nn.Module, list[torch.Tensor], ClipNorm], torch.Tensor]
"""Clips gradients and returns their norm."""


def wrong_clippings(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Clipping left out, by a wrong norm, per tensor, or before the reduction."""
    clipping = diverged.training.clipping
    if clipping is None:
        return
    by_value = isinstance(clipping, ClipValue)
    change = with_clipping(ClipValue(clip_value=1e300)) if by_value else partial(_clipping_with, clip=clip_nothing)
    yield on_one_device(diverged, Cause.NOT_CLIPPED, "gradients are not clipped", change)
    if isinstance(clipping, ClipNorm):
        yield from wrong_norms(diverged, clipping)
        words = "each tensor is clipped by its own norm"
        yield on_one_device(diverged, Cause.PART_OF_NORM, words, partial(_clipping_with, clip=_clip_each))
    yield from _before_reduction(diverged, clipping)


def _clipping_with(setup: Setup, clip: Clip) -> None:
    setup.clip_norm = clip


def _clip_each(module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    whole = clip_nothing(module, parameters, clipping)
    for parameter in parameters:
        if parameter.grad is not None:
            scale_to([parameter], clipping, norm_of([parameter.grad], clipping.norm_type))
    return whole


def _before_reduction(diverged: DivergedRun, clipping: ClipNorm | ClipValue) -> Iterator[Counterfactual]:
    if not diverged.data_axes or not diverged.can_be_emulated:
        return
    words = "each rank clips the gradients of its own rows before they are reduced"
    for again, more in ((False, ""), (True, ", and again afterwards")):
        for when in (ONCE, EACH):
            change = _clip_early(clipping, again=again, when=when)
            yield on_emulated_ranks(diverged, Cause.CLIPPED_BEFORE_REDUCTION, words + more, change)


def _clip_early(clipping: ClipNorm | ClipValue, *, again: bool, when: WhenReduced) -> Callable[[EmulatedRanks], None]:
    def clip(gradients: Gradients) -> None:
        holders = [torch.empty_like(value) for value in gradients.values()]
        for holder, value in zip(holders, gradients.values(), strict=True):
            holder.grad = value
        if isinstance(clipping, ClipNorm):
            scale_to(holders, clipping, norm_of(gradients.values(), clipping.norm_type))
        else:
            nn.utils.clip_grad_value_(holders, clipping.clip_value)

    def change(ranks: EmulatedRanks) -> None:
        ranks.when_reduced = when
        ranks.before_reducing.append(clip)
        if not again:
            for setup in ranks.setups:
                setup.clip_norm = clip_nothing

    return change
