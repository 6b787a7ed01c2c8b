"""Start every step from the reference's parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from equivcheck.errors import EquivCheckError
from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.oracle.reference.rounded import rounded_setup
from equivcheck.scenario import Scenario
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.read import local_values, state_slots
from equivcheck.training.setup import Setup, unsharded_state
from equivcheck.worlds.trace.pieces import TensorsByName, select_piece
from equivcheck.worlds.trace.trace import Piece, Slot


class NotWritable(EquivCheckError):
    """Tensor on a rank that cannot be overwritten piece by piece; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """The reference's values when a step starts."""

    parameters: TensorsByName
    """Full parameters by name."""
    state: TensorsByName
    """Optimizer state by ``parameter/key``; empty before the first update."""
    types: dict[str, torch.dtype]
    """Element type per state."""


def values_at_steps(scenario: Scenario) -> list[StepValues]:
    """Train on one device and record the values before each step."""
    rounding, kept = rounding_of(scenario.layout, scenario.training.precision), list[StepValues]()
    setup = single_device_setup(scenario.training) if rounding is None else rounded_setup(scenario.training, rounding)

    def keep(optimizer: torch.optim.Optimizer, _step: int) -> None:
        named = dict(setup.model.named_parameters())
        state = {
            f"{name}/{key}": torch.as_tensor(value)
            for name, parameter in named.items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        kept.append(
            StepValues(
                parameters={name: _array(value) for name, value in named.items()},
                state={name: _array(value) for name, value in state.items()},
                types={name: value.dtype for name, value in state.items()},
            )
        )

    setup.before_step.append(keep)
    train(setup)
    return kept


def _array(value: torch.Tensor) -> Any:
    return value.detach().to(torch.float64).numpy().copy()


def start_steps_from(
    values: Sequence[StepValues], alter: Callable[[Setup], None] | None, *, state: bool
) -> Callable[[Setup], None]:
    """Apply `alter`, then start each step from the reference's parameters, and with `state` also from its optimizer state.

    The hook runs last, so it also restores values that `alter` loses between steps.
    """

    def change(setup: Setup) -> None:
        if alter is not None:
            alter(setup)
        setup.before_step.append(lambda optimizer, step: _write_all(setup, optimizer, values[step], state=state))

    return change


def _write_all(setup: Setup, optimizer: torch.optim.Optimizer, values: StepValues, *, state: bool) -> None:
    slots = setup.find_slots(setup.model)
    for slot in slots:
        _write(slot.parameter, slot.pieces, values.parameters)
    if state:
        if setup.state_of is unsharded_state:
            _make_missing(optimizer, slots, values)
        for slot, tensor in state_slots(setup.state_of(optimizer), slots):
            _write(tensor, slot.pieces, values.state)


def _make_missing(optimizer: torch.optim.Optimizer, slots: Sequence[Slot], values: StepValues) -> None:
    """Create optimizer state that the reference already has."""
    for slot in slots:
        piece = slot.pieces[0]
        for name, value in values.state.items():
            parameter, _, key = name.rpartition("/")
            if parameter == piece.name and key not in optimizer.state.get(slot.parameter, {}):
                whole = value.shape == piece.shape
                made = torch.zeros_like(slot.parameter) if whole else torch.from_numpy(np.array(value)).to(values.types[name])
                cast(MutableMapping[str, Any], optimizer.state[slot.parameter])[key] = made


def _write(tensor: torch.Tensor, pieces: tuple[Piece, ...], wholes: Mapping[str, Any]) -> None:
    local = local_values(tensor)
    expected = sum(piece.numel for piece in pieces)
    if local.numel() != expected:
        raise NotWritable(f"{pieces[0].name} has {local.numel()} elements on a rank, not {expected} as its layout says")
    parts = [_part(piece, wholes) for piece in pieces]
    if all(part is None for part in parts):
        return
    place, flat = 0, local.reshape(-1).clone()
    for piece, part in zip(pieces, parts, strict=True):
        if part is not None:
            flat[place : place + piece.numel] = torch.from_numpy(np.ascontiguousarray(part)).to(flat.dtype)
        place += piece.numel
    with torch.no_grad():
        local.copy_(flat.reshape(local.shape))


def _part(piece: Piece, wholes: Mapping[str, Any]) -> Any:
    whole = wholes.get(piece.name)
    if whole is None or whole.shape != piece.shape:
        return None
    return select_piece(whole, piece)
