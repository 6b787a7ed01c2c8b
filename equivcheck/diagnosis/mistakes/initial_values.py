"""Mistakes in initial parameters or buffers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.diagnosis.evidence import Evidence
from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import name_ranks, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.worlds.trace.pieces import assemble_tensors, fill, select_piece, values_by_piece
from equivcheck.worlds.trace.tensors import Vector


def wrong_start(diverged: Evidence, _facts: StepFacts | None = None) -> Iterator[Mistake]:
    """Yield a mistake: ranks start with other values than one device, or with the right values in wrong places."""
    right = diverged.right_initial_values
    wrong = [
        (piece.name, rank)
        for rank, initial in enumerate(diverged.initial)
        for piece, values in values_by_piece(initial)
        if values is not None and piece.name in right and right[piece.name].shape == piece.shape
        if not np.array_equal(values, select_piece(right[piece.name], piece))
    ]
    if wrong:
        names, ranks = sorted({name for name, _ in wrong}), sorted({rank for _, rank in wrong})
        some_ranks = len(ranks) < len(diverged.initial)
        who = f"{name_ranks(ranks)} start{'s' if len(ranks) == 1 else ''}" if some_ranks else "every rank starts"
        cause, words = Cause.UNEQUAL_START, f"{who} with other values of {tensors(names)} than one device"
        found = assemble_tensors(diverged.initial)
        if all(_is_permuted(found[name], right[name]) for name in names):
            cause = Cause.PERMUTED
            words = f"{who} with the elements of {tensors(names)} in wrong places: wrong order, or wrong dim"
        yield Mistake(cause, words, partial(start_as_ranks, diverged))


def _is_permuted(found: Vector, right: Vector) -> bool:
    return not np.array_equal(found, right) and np.array_equal(np.sort(found, axis=None), np.sort(right, axis=None))


def start_as_ranks(diverged: Evidence, ranks: EmulatedRanks) -> None:
    """Give emulated ranks the initial values of the real ranks."""
    for model, parameters, initial in zip(ranks.models, ranks.parameters, diverged.initial, strict=True):
        held = {**parameters, **dict(model.named_buffers())}
        for piece, values in values_by_piece(initial):
            if values is not None and piece.name in held and tuple(held[piece.name].shape) == piece.shape:
                full = held[piece.name].detach().double().numpy().copy()
                fill(full, piece, values)
                held[piece.name].data.copy_(torch.from_numpy(full))
    ranks.held.gather([{name: value.data for name, value in own.items()} for own in ranks.parameters])
