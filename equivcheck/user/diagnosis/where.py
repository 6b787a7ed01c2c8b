"""Find the first module whose output or output gradient differs, in a second run with hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from equivcheck.diagnosis.words import name_ranks
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.noise import ABSOLUTE, FACTOR
from equivcheck.training.threads import one_thread
from equivcheck.user.batches import convert_batch, part_number_at
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.modules import ModuleTensor, WatchedRun, watched_device, watched_rank
from equivcheck.user.randomness import seed_generators
from equivcheck.user.ranks import build_model
from equivcheck.user.reference import perturbed_start
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.sim.stand_ins.compiling import REFUSAL
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.pieces import select_piece

COMPILED = "no module is named, because your model is compiled and runs as one function"
NO_MODULE = "all module outputs and output gradients agree at step {step}; the first difference is in the {rest}"
NUM_COPIES = 4
"""Number of perturbed single-device runs; they set the tolerances."""

Key = tuple[str, int, bool]


def where_of(diverged: DivergedTraining) -> str:
    """Describe the first wrong module.

    Empty if neither loss nor gradients differ first, or if the second run differs in another place.
    """
    if diverged.first.phase not in (Phase.LOSS, Phase.GRADIENT):
        return ""
    try:
        members = ranks("sim", diverged.task.num_ranks)
        found: Sequence[WatchedRun] = members.run(watched_rank, diverged.task, diverged.first.step).values
    except RanksFailed as error:
        culprit = error.failure.culprit
        return COMPILED if culprit is not None and REFUSAL in culprit.error else ""
    again = compare(diverged.reference, [each.trace for each in found]).divergences
    first = diverged.first
    if not again or (again[0].step, again[0].phase, again[0].tensor) != (first.step, first.phase, first.tensor):
        return ""
    with one_thread():
        expected, tolerances = _expected(diverged)
    return _first_wrong_module(diverged, expected, tolerances, found)


def _expected(diverged: DivergedTraining) -> tuple[WatchedRun, dict[Key, float]]:
    """The single-device tensors with their tolerances, from perturbed copies."""
    task, at = diverged.task, diverged.first.step
    with seed_generators(task.seed):
        own = watched_device(task, at, build_model(task), [convert_batch(batch, task.dtype) for batch in task.batches])
        spread = dict[Key, float]()
        for number in range(NUM_COPIES):
            copied = watched_device(task, at, **perturbed_start(task, number, diverged.eps))
            copy = {_key(each): each.values for each in copied.seen}
            for each in own.seen:
                other = copy.get(_key(each), each.values)
                spread[_key(each)] = max(spread.get(_key(each), 0.0), float((other - each.values).norm()))
    sizes = {_key(each): float(each.values.norm()) for each in own.seen}
    eps = diverged.eps
    return own, {key: FACTOR * max(spread[key], eps * size) + ABSOLUTE * eps * size for key, size in sizes.items()}


def _key(seen: ModuleTensor) -> Key:
    return seen.module, seen.call, seen.is_gradient


def _first_wrong_module(
    diverged: DivergedTraining, expected: WatchedRun, tolerances: dict[Key, float], found: Sequence[WatchedRun]
) -> str:
    calls = [Counter((each.module, each.is_gradient) for each in watched.seen) for watched in (expected, *found)]
    by_key = [{_key(each): each for each in watched.seen} for watched in found]
    num_compared = 0
    for each in sorted(expected.seen, key=lambda seen: seen.is_gradient):
        name = (each.module, each.is_gradient)
        if any(count[name] not in (0, calls[0][name]) for count in calls):
            continue  # some ranks call it again, for example under activation checkpointing
        compared = {
            rank: _differs(diverged, rank, each, seen[_key(each)], tolerances[_key(each)])
            for rank, seen in enumerate(by_key)
            if _key(each) in seen
        }
        num_compared += any(differs is not None for differs in compared.values())
        wrong = [rank for rank, differs in compared.items() if differs]
        if wrong:
            what, way = ("output gradient", "backward") if each.is_gradient else ("output", "forward")
            where = f"{each.module or 'the full model'} ({way}, {name_ranks(wrong)}), at step {diverged.first.step}"
            return f"first module whose {what} differs: {where}"
    rest = "loss" if diverged.first.phase is Phase.LOSS else "parameter gradients"
    return NO_MODULE.format(step=diverged.first.step, rest=rest) if num_compared == len(expected.seen) else ""


def _differs(diverged: DivergedTraining, rank: int, expected: ModuleTensor, seen: ModuleTensor, tolerance: float) -> bool | None:
    """Whether a rank's tensor differs from its part in the expected one; None if the part is unknown.

    The user's loss may be a mean over a rank's own rows. Then output gradients are larger by the number of data ranks, so both
    scales are accepted.
    """
    count, own = diverged.task.num_data_ranks, _rows(diverged, rank, expected.values)
    part = _part_of(own, seen)
    if part is None and not (seen.is_gradient and count > 1):
        part = _part_of(expected.values, seen)
    if part is None:
        return None
    values = seen.values.reshape(-1)
    scales = (1, count) if seen.is_gradient else (1,)
    return all(bool((values / scale - part.reshape(-1)).norm() > tolerance) for scale in scales)


def _part_of(full: torch.Tensor | None, seen: ModuleTensor) -> torch.Tensor | None:
    """The rank's part in a full tensor, by DTensor placements; None if shapes do not fit."""
    if full is None or tuple(full.shape) != (tuple(seen.values.shape) if seen.piece is None else seen.piece.shape):
        return None
    return full if seen.piece is None else torch.from_numpy(select_piece(full.numpy(), seen.piece))


def _rows(diverged: DivergedTraining, rank: int, full: torch.Tensor) -> torch.Tensor | None:
    """The rank's rows under the default sharding; None if they are unknown."""
    task = diverged.task
    count = task.num_data_ranks
    if task.shard is not None or not full.dim() or full.shape[0] % count:
        return None
    return full.chunk(count)[part_number_at(task, diverged.coordinates[rank].indices)]
