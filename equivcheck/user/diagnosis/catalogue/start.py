"""Mistakes at the start: wrong initial parameters, or permuted ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from equivcheck.diagnosis.words import numbered, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, parameters_by_name
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.mistake import Mistake, StepFacts
from equivcheck.user.ranks import build_model
from equivcheck.worlds.trace.pieces import fill, part_of, parts_of


def wrong_start(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield the ranks' initial parameters if they are wrong."""
    right = {name: value.detach().double().numpy() for name, value in parameters_by_name(build_model(diverged.task)).items()}
    wrong = [
        (piece.name, rank)
        for rank, initial in enumerate(diverged.initial)
        for piece, values in parts_of(initial)
        if values is not None and piece.name in right and right[piece.name].shape == piece.shape
        if not np.array_equal(values, part_of(right[piece.name], piece))
    ]
    if wrong:
        names, ranks = sorted({name for name, _ in wrong}), sorted({rank for _, rank in wrong})
        alone = len(ranks) < len(diverged.initial)
        who = f"{numbered(ranks)} start{'s' if len(ranks) == 1 else ''}" if alone else "every rank starts"
        cause, words = Cause.UNEQUAL_START, f"{who} with other values of {tensors(names)} than one device"
        if all(_is_permuted(diverged, name, right[name]) for name in names):
            cause = Cause.PERMUTED
            words = f"{who} with the elements of {tensors(names)} in wrong places: wrong order, or wrong dim"
        yield Mistake(cause, words, lambda emulated: _start_there(diverged, emulated))


def _is_permuted(diverged: DivergedTraining, name: str, right: np.ndarray) -> bool:
    found = np.full(right.shape, np.nan)
    for initial in reversed(diverged.initial):
        for piece, values in parts_of(initial):
            if piece.name == name and values is not None:
                fill(found, piece, values)
    return not np.array_equal(found, right) and np.array_equal(np.sort(found, axis=None), np.sort(right, axis=None))


def _start_there(diverged: DivergedTraining, ranks: EmulatedUserRanks) -> None:
    for own, initial in zip(ranks.parameters, diverged.initial, strict=True):
        for piece, values in parts_of(initial):
            if values is not None and piece.name in own and tuple(own[piece.name].shape) == piece.shape:
                whole = own[piece.name].detach().double().numpy().copy()
                fill(whole, piece, values)
                own[piece.name].data.copy_(torch.from_numpy(whole))
    ranks.held.gather([{name: value.data for name, value in own.items()} for own in ranks.parameters])
