"""Wrong initial parameters or buffers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from equivcheck.diagnosis.catalogue.counterfactual import on_emulated_ranks
from equivcheck.diagnosis.diverged_run import DivergedRun, initial_values
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import name_ranks, tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.training.loop import single_device_setup
from equivcheck.worlds.trace.pieces import TensorsByName, fill, full_tensors_of, select_piece


def wrong_initial_values(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield the ranks' own initial values if these are wrong or on a wrong rank."""
    expected = _expected(diverged)
    wrong = [
        (piece.name, rank)
        for rank, initial in enumerate(diverged.initial)
        for piece, values in initial.parts()
        if piece.name in expected and not np.array_equal(values, select_piece(expected[piece.name], piece))
    ]
    if wrong:
        names, ranks = sorted({name for name, _ in wrong}), sorted({rank for _, rank in wrong})
        who = (
            "every rank starts" if len(ranks) == len(diverged.initial) else f"{name_ranks(ranks)} start{'s' * (len(ranks) == 1)}"
        )
        cause, words = Cause.UNEQUAL_START, f"{who} from wrong initial values of {tensors(names)}"
        if all(_is_permuted(diverged, name, expected) for name in names):
            cause = Cause.PERMUTED
            words = f"the elements of {tensors(names)} are in wrong places: shards are in the wrong order or along the wrong dim"
        yield on_emulated_ranks(cause, words, lambda ranks: _start_there(diverged, ranks))


def _expected(diverged: DivergedRun) -> TensorsByName:
    own = initial_values(single_device_setup(diverged.training))
    return full_tensors_of(own.parameters) | full_tensors_of(own.buffers)


def _is_permuted(diverged: DivergedRun, name: str, expected: TensorsByName) -> bool:
    """Whether the tensor gathered from all ranks has the right elements in wrong places."""
    right = expected[name]
    found = np.full(right.shape, np.nan)
    for initial in reversed(diverged.initial):
        for piece, values in initial.parts():
            if piece.name == name and piece.shape == found.shape:
                fill(found, piece, values)
    return not np.array_equal(found, right) and np.array_equal(np.sort(found, axis=None), np.sort(right, axis=None))


def _start_there(diverged: DivergedRun, ranks: ScenarioRanks) -> None:
    for setup, initial in zip(ranks.setups, diverged.initial, strict=True):
        held = {**dict(setup.model.named_parameters()), **dict(setup.model.named_buffers())}
        for piece, values in initial.parts():
            if piece.name in held:
                fill(held[piece.name].detach().numpy(), piece, values)
    ranks.held.gather([{name: value.data for name, value in each.model.named_parameters()} for each in ranks.setups])
