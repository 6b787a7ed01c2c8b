"""Gradients that are clipped wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import torch
from torch import nn

from equivcheck.diagnosis.case import Case
from equivcheck.diagnosis.counterfactual import Counterfactual, alone, side_by_side
from equivcheck.diagnosis.early_clipping import clipped_early
from equivcheck.diagnosis.gathering import gathering_of
from equivcheck.diagnosis.norms import gradients_of, norm_of, not_at_all, scale_to
from equivcheck.diagnosis.side_by_side import SideBySide
from equivcheck.diagnosis.words import over, tensors
from equivcheck.scenario import ClipNorm, ClipValue, NormType
from equivcheck.trace.differences import Phase
from equivcheck.train.setup import Setup
from equivcheck.verdict.cause import Cause

Clip = Callable[[nn.Module, list[torch.Tensor], ClipNorm], torch.Tensor]
MAX_SETS = 4096
"""Sets of tensors of which the norm is tried."""


def wrong_clippings(case: Case) -> Iterator[Counterfactual]:
    """Not at all, by the norm of a shard or of some tensors, with replicas counted, before the reduction."""
    clipping = case.scenario.training.clipping
    if clipping is None:
        return
    if isinstance(clipping, ClipValue):
        huge = replace(clipping, clip_value=1e300)
        yield alone(case, Cause.NOT_CLIPPED, "gradients are not clipped", _clipping_with(huge))
    else:
        yield alone(case, Cause.NOT_CLIPPED, "gradients are not clipped", _with_clip(not_at_all))
        yield from _local(case)
        yield from _replicas(case)
        yield from _another(case, clipping)
        yield from _part(case, clipping)
        yield from _each(case)
    yield from clipped_early(case)


def _clipping_with(clipping: ClipNorm | ClipValue) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        setup.training = replace(setup.training, clipping=clipping)

    return change


def _with_clip(clip: Clip) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        setup.clip_norm = clip

    return change


def _each(case: Case) -> Iterator[Counterfactual]:
    def clip(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
        whole = not_at_all(_module, parameters, clipping)
        for parameter in parameters:
            if parameter.grad is not None:
                scale_to([parameter], clipping, norm_of([parameter.grad], clipping.norm_type))
        return whole

    yield alone(case, Cause.PART_OF_NORM, "each tensor is clipped by its own norm", _with_clip(clip))


def _another(case: Case, clipping: ClipNorm) -> Iterator[Counterfactual]:
    """Norms of another type, or of parts, added up."""
    for kind in NormType:
        if kind is not clipping.norm_type:
            words = f"gradients are clipped by their {kind.value}-norm, not by their {clipping.norm_type.value}-norm"
            yield alone(case, Cause.ANOTHER_NORM, words, _clipping_with(replace(clipping, norm_type=kind)))
    words = "the norms of tensors are added up, not put together as their type asks for"
    yield alone(case, Cause.ANOTHER_NORM, words, _with_clip(_added_up_over_tensors))
    if case.scenario.start is None and case.rounding is None:
        words = "the norms of what each rank holds are added up, not put together as their type asks for"
        yield side_by_side(case, Cause.ANOTHER_NORM, words, _added_up_over_ranks)


def _added_up_over_tensors(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
    norm: torch.Tensor = torch.stack([norm_of([each], clipping.norm_type) for each in gradients_of(parameters)]).sum()
    scale_to(parameters, clipping, norm)
    return norm


def _added_up_over_ranks(trainings: SideBySide) -> None:
    for setup in trainings.setups:
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in setup.model.named_parameters()}

        def clip(
            _module: nn.Module,
            parameters: list[torch.Tensor],
            clipping: ClipNorm,
            names: Mapping[torch.Tensor, str] = names,
        ) -> torch.Tensor:
            norms = [
                norm_of(
                    [
                        parameter.grad[trainings.gathering.held(names[parameter], seat.rank)]
                        for parameter in parameters
                        if parameter.grad is not None
                    ],
                    clipping.norm_type,
                )
                for seat in trainings.seats
            ]
            norm: torch.Tensor = torch.stack(norms).sum()
            scale_to(parameters, clipping, norm)
            return norm

        setup.clip_norm = clip


def _local(case: Case) -> Iterator[Counterfactual]:
    """The norm over what the ranks along some axes hold together; over none, over what one rank holds."""
    mesh = case.scenario.layout.mesh
    axes = tuple(name for name in mesh.names if mesh.size(name) > 1)
    if case.rounding is not None or case.scenario.start is not None:
        return
    for count in range(len(axes)):
        for kept in combinations(axes, count):
            words = "each rank clips by the norm of what it holds alone"
            if kept:
                words = f"the norm is reduced over {over(mesh, kept)} alone"
            for reported in (False, True):
                more = ", and returns the norm of all" if reported else ""
                change = _locally(kept, reported=reported)
                yield side_by_side(case, Cause.LOCAL_NORM, words + more, change)


def _locally(kept: tuple[str, ...], *, reported: bool) -> Callable[[SideBySide], None]:
    def change(trainings: SideBySide) -> None:
        for seat, setup in zip(trainings.seats, trainings.setups, strict=True):
            names: dict[torch.Tensor, str] = {parameter: name for name, parameter in setup.model.named_parameters()}
            peers = trainings.peers(seat, kept)

            def clip(
                module: nn.Module,
                parameters: list[torch.Tensor],
                clipping: ClipNorm,
                names: Mapping[torch.Tensor, str] = names,
                peers: Sequence[int] = peers,
            ) -> torch.Tensor:
                values = [
                    parameter.grad[trainings.gathering.held_by_any(names[parameter], peers)]
                    for parameter in parameters
                    if parameter.grad is not None
                ]
                norm, whole = norm_of(values, clipping.norm_type), not_at_all(module, parameters, clipping)
                scale_to(parameters, clipping, norm)
                return whole if reported else norm

            setup.clip_norm = clip

    return change


def _replicas(case: Case) -> Iterator[Counterfactual]:
    """What several ranks along some axes hold counts as often."""
    mesh = case.scenario.layout.mesh
    axes = tuple(name for name in mesh.names if mesh.size(name) > 1)
    if case.scenario.start is not None:
        return
    gathering = gathering_of(case)
    for count in range(len(axes), 0, -1):
        for chosen in combinations(axes, count):
            counts = {name: gathering.copies(name, chosen) for name in gathering.names}
            if any(bool((each > 1).any()) for each in counts.values()):
                words = f"the norm counts what {over(mesh, chosen)} hold alike once for each of them"
                yield alone(case, Cause.REPLICAS_IN_NORM, words, _counting(counts))


def _counting(counts: Mapping[str, torch.Tensor]) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in setup.model.named_parameters()}

        def clip(_module: nn.Module, parameters: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
            kind = float(clipping.norm_type.value)
            values = [
                parameter.grad * counts[names[parameter]].to(parameter.grad.dtype) ** (1 / kind)
                for parameter in parameters
                if parameter.grad is not None
            ]
            norm = norm_of(values, clipping.norm_type)
            scale_to(parameters, clipping, norm)
            return norm

        setup.clip_norm = clip

    return change


def _part(case: Case, clipping: ClipNorm) -> Iterator[Counterfactual]:
    """The norm over some tensors, such that it is what the ranks must have clipped by."""
    for names in _sets(case, clipping):
        missing = [name for name in case.updated if name not in names]
        words = f"the norm leaves {tensors(missing)} out" if names else "the norm is that of nothing"
        for reported in (False, True):
            for everything in (True, False):
                more = "" if everything else f", and {'they are' if len(missing) > 1 else 'it is'} not clipped"
                yield alone(case, Cause.PART_OF_NORM, words + more, _partly(names, everything=everything, reported=reported))


def _sets(case: Case, clipping: ClipNorm) -> list[tuple[str, ...]]:
    gradients = case.expected_values(case.first.step, Phase.GRADIENT)
    names = [name for name in case.updated if name in gradients and gradients[name].any()]
    order = float(clipping.norm_type.value)
    sizes = np.array([np.linalg.norm(gradients[name].reshape(-1), order) for name in names])
    implied = implied_norms(case, clipping)
    if 2 ** len(names) > MAX_SETS or not implied:
        return []
    found = []
    for mask in range(2 ** len(names) - 1):
        chosen = np.array([bool(mask >> at & 1) for at in range(len(names))])
        norm = np.linalg.norm(sizes[chosen], order) if chosen.any() else 0.0
        if any(np.isclose(norm, each, rtol=1e-6, atol=0.0) for each in implied):
            found.append(tuple(name for name, taken in zip(names, chosen, strict=True) if taken))
    return sorted(found, key=len, reverse=True)[:4]


def implied_norms(case: Case, clipping: ClipNorm) -> list[float]:
    """The norms that ranks returned in the first step that differs, or must have scaled by."""
    found = case.whole(case.first.step, Phase.CLIPPING)
    implied = [float(found["norm"])] if "norm" in found else []
    gradients = case.whole(case.first.step, Phase.GRADIENT)
    for name, values in found.items():
        before = gradients.get(name)
        if before is not None and before.any():
            at = np.unravel_index(np.argmax(np.abs(before)), before.shape)
            if values[at] and abs(values[at]) < abs(before[at]):
                implied.append(clipping.max_norm * float(before[at] / values[at]) - 1e-6)
    return implied


def _partly(names: Sequence[str], *, everything: bool, reported: bool) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        parameters = dict(setup.model.named_parameters())

        def clip(module: nn.Module, every: list[torch.Tensor], clipping: ClipNorm) -> torch.Tensor:
            chosen = [parameters[name] for name in names]
            whole = not_at_all(module, every, clipping)
            norm = norm_of([value.grad for value in chosen if value.grad is not None], clipping.norm_type)
            scale_to(every if everything else chosen, clipping, norm)
            return whole if reported else norm

        setup.clip_norm = clip

    return change
