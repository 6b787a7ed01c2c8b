"""Clips by the single-device run's norms, and runs the ranks again. If they are right now, they clip by a wrong norm."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from equivcheck.diagnosis.emulation.emulated_ranks import Scale, norm_of
from equivcheck.diagnosis.emulation.held_elements import held_elements
from equivcheck.diagnosis.evidence import RATIO
from equivcheck.diagnosis.patterns import NO_PROOF
from equivcheck.oracle.reference.reduction import Gradients
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.user.diagnosis.contradiction import are_gradients_scaled
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.interception import intercept_clipping
from equivcheck.user.diagnosis.repair import CONFIRMED, is_right_with, reducing_rank
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import select_piece, values_by_piece

LOCAL = f"each rank clips by its local norm, over the elements that it holds {CONFIRMED.format('the norm over all elements')}"
BY_HAND = (
    "on each rank, all gradients have the size that clipping by the rank's local norm gives, over the elements that it holds "
    f"{NO_PROOF}: is the norm in your step reduced over all ranks?"
)
OTHER = f"your ranks clip by another norm than one device {CONFIRMED.format('the norm of one device')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clippings:
    norms: list[float]
    """The single-device run's norms, one for each clipping."""
    gradients: Gradients
    """Gradients before the clipping in the first wrong step."""
    kind: float
    """Norm type in the first wrong step."""


def wrong_norms(diverged: DivergedTraining) -> list[Diagnosis]:
    """Explain ranks that clip by a wrong norm. Empty unless the ranks agree with one device once they use the right norms.

    The ranks themselves train again with these norms. An emulation is not enough if ranks compute a module together, because each
    rank clips its replicas differently.
    """
    if diverged.first.phase is not Phase.GRADIENT or not are_gradients_scaled(diverged):
        return []
    right = _clippings_on_device(diverged)
    if right is None:
        return []
    counts = Counter[int]()

    def clip(tensors: list[torch.Tensor], _kind: float, scale: Scale) -> torch.Tensor:
        rank = dist.get_rank()
        counts[rank] += 1
        norm = torch.tensor(right.norms[counts[rank] - 1], dtype=torch.float64)
        scale(tensors, norm)
        return norm

    with intercept_clipping(clip):
        is_right = is_right_with(diverged, reducing_rank, {}, 0)
    if not is_right or not counts:
        return []
    cause, words = (Cause.LOCAL_NORM, LOCAL) if _are_local(diverged, right) else (Cause.ANOTHER_NORM, OTHER)
    return [Diagnosis(cause=cause, sentence=words, exact=True)]


def _clippings_on_device(diverged: DivergedTraining) -> _Clippings | None:
    """Return norms and gradients of one device. None if it does not clip in the first wrong step."""
    ranks, norms, found = EmulatedUserRanks(diverged, own_rows=False, one=True), list[float](), list[tuple[Gradients, float]]()

    def record(rank: int, gradients: Gradients, kind: float) -> torch.Tensor:
        norm = norm_of(gradients.values(), kind)
        norms.append(float(norm))
        if ranks.current_step(rank) == diverged.first.step:
            found.append(({name: value.clone() for name, value in gradients.items()}, kind))
        return norm

    ranks.norm = record
    try:
        ranks.train(diverged.num_steps)
    except Exception:  # torch or the user's code rejects the emulation
        return None
    return _Clippings(norms=norms, gradients=found[0][0], kind=found[0][1]) if found else None


def clipped_by_hand(diverged: DivergedTraining) -> Diagnosis | None:
    """Hint at ranks that clip by their local norm, if the step calls no clipping of torch. None if they do not."""
    if diverged.first.phase is not Phase.GRADIENT or not are_gradients_scaled(diverged):
        return None
    expected = diverged.expected_values(diverged.first.step, Phase.GRADIENT)
    clipped = _Clippings(norms=[], gradients={name: torch.from_numpy(value) for name, value in expected.items()}, kind=2.0)
    # If each rank's norm is nearly the norm over all elements, the factors are nearly 1, and any small difference fits.
    norms = [norm for norm in _local_norms(diverged, clipped) if norm]  # a rank without gradients has no factor
    is_visible = bool(norms) and min(norms) < 0.99 * float(norm_of(clipped.gradients.values(), clipped.kind))
    is_local = is_visible and _are_local(diverged, clipped, math.inf)
    return Diagnosis(cause=Cause.LOCAL_NORM, sentence=BY_HAND, exact=False) if is_local else None


def _are_local(diverged: DivergedTraining, right: _Clippings, most: float = 1.0) -> bool:
    """Whether each rank scales its gradients in the first wrong step as the norm over its own elements requires.

    Ranks without gradients, or with zeros only, do not count. A factor is at most `most`.
    """
    expected = diverged.expected_values(diverged.first.step, Phase.GRADIENT)
    norm = float(norm_of(right.gradients.values(), right.kind))
    factor = _ratio([(expected[name].reshape(-1), value.double().numpy().reshape(-1)) for name, value in right.gradients.items()])
    for trace, own in zip(diverged.traces, _local_norms(diverged, right), strict=True):
        pairs = [
            (values, select_piece(right.gradients[piece.name].double().numpy(), piece))
            for piece, values in values_by_piece(trace.steps[diverged.first.step].gradients)
            if values is not None and piece.name in right.gradients
        ]
        has_gradients = any(before.any() for _, before in pairs)
        if has_gradients and not np.isclose(_ratio(pairs), min(most, factor * norm / own), rtol=RATIO):
            return False
    return True


def _local_norms(diverged: DivergedTraining, right: _Clippings) -> list[float]:
    """Return each rank's norm over the elements that it holds."""
    held = held_elements(diverged)
    return [
        float(norm_of([value[held.by(name, rank)] for name, value in right.gradients.items()], right.kind))
        for rank in range(len(diverged.traces))
    ]


def _ratio(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the factor between tensors before and after scaling, as a least-squares fit."""
    scaled, before = (np.concatenate([np.asarray(each).reshape(-1) for each in column]) for column in zip(*pairs, strict=True))
    return float(scaled @ before / (before @ before))
