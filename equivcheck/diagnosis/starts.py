"""What ranks start from, read when everything has been set up and nothing has been trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from equivcheck.scenario import Training
from equivcheck.trace.pieces import fill, part_of, parts_of, whole_tensors
from equivcheck.trace.tensors import Vector
from equivcheck.trace.trace import Piece, Snapshot
from equivcheck.train.read import buffer_snapshot, snapshot
from equivcheck.train.setup import Setup
from equivcheck.train.single_device import single_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What one rank starts from."""

    parameters: Snapshot
    """Its parameters."""
    buffers: Snapshot
    """Its buffers."""

    def parts(self) -> Iterator[tuple[Piece, Vector]]:
        """Each piece with its values."""
        for kept in (self.parameters, self.buffers):
            for piece, values in parts_of(kept):
                if values is not None and piece.name:
                    yield piece, values


def begun(setup: Setup) -> Begun:
    """What a rank holds now."""
    slots = setup.find_slots(setup.model)
    pieces = tuple(piece for slot in slots for piece in slot.pieces)
    parameters = snapshot(slots, pieces, [slot.parameter for slot in slots])
    return Begun(parameters=parameters, buffers=buffer_snapshot(setup.model))


def watched(alter: Callable[[Setup], None] | None, kept: dict[int, Begun]) -> Callable[[Setup], None]:
    """`alter`, and a look at what each rank then starts from; for ranks that are threads."""

    def change(setup: Setup) -> None:
        if alter is not None:
            alter(setup)
        setup.before_training.append(lambda _optimizer, _schedule: kept.update({dist.get_rank(): begun(setup)}))

    return change


def moved(training: Training, starts: tuple[Begun, ...]) -> list[tuple[str, int]]:
    """Each tensor that a rank starts with another value of than the training's own, and the rank."""
    own = begun(single_device(training))
    given = whole_tensors(own.parameters) | whole_tensors(own.buffers)
    return [
        (piece.name, rank)
        for rank, start in enumerate(starts)
        for piece, values in start.parts()
        if piece.name in given and not np.array_equal(values, part_of(given[piece.name], piece))
    ]


def permuted(training: Training, starts: tuple[Begun, ...], names: list[str]) -> bool:
    """Whether tensors have the right elements in other places, put together from all ranks."""
    own = begun(single_device(training))
    given = whole_tensors(own.parameters) | whole_tensors(own.buffers)
    found = {name: np.full(given[name].shape, np.nan) for name in names}
    for start in reversed(starts):
        for piece, values in start.parts():
            if piece.name in found and piece.shape == found[piece.name].shape:
                fill(found[piece.name], piece, values)
    return all(
        not np.array_equal(found[name], given[name])
        and np.array_equal(np.sort(found[name], axis=None), np.sort(given[name], axis=None))
        for name in names
    )
