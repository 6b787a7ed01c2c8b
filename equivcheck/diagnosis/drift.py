"""Finds the steps that go wrong although each starts from the reference's values, or the state that carries an error over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.words import join_words
from equivcheck.errors import EquivCheckError
from equivcheck.layouts.composition.registry import rounding_of
from equivcheck.layouts.composition.running import Runner
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.rounded import rounded_setup
from equivcheck.scenario import Scenario
from equivcheck.training.loop import single_device_setup, train
from equivcheck.training.read import local_values, state_slots
from equivcheck.training.setup import Setup, unsharded_state
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.ranks import Ranks
from equivcheck.worlds.trace.differences import Divergence, Phase
from equivcheck.worlds.trace.pieces import TensorsByName, select_piece
from equivcheck.worlds.trace.trace import Piece, Slot

FROM_REFERENCE = "when it starts from the reference's values"


def drift_of(diverged: DivergedRun, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float) -> str:
    """Start each step from the reference's values, and return text with the steps that still differ.

    If ranks cannot start from these values, the text says why.
    """
    if diverged.training.steps == 1:
        return "in the only step"
    if diverged.resumes:
        return "not examined: the first steps run under another layout"
    if (world if isinstance(world, str) else world.name) != "sim":
        return "not examined: only the sim world can give ranks the reference's values"
    try:
        return _sentence(diverged.training.steps, lambda state: _divergences(diverged, alter, world, deadline, state=state))
    except RanksFailed as error:
        return f"not examined: the ranks fail when given the reference's values ({error})"
    except (EquivCheckError, RuntimeError) as error:
        return f"not examined: the ranks cannot be given the reference's values ({error})"


def _divergences(
    diverged: DivergedRun, alter: Callable[[Setup], None] | None, world: str | Ranks, deadline: float, *, state: bool
) -> tuple[Divergence, ...]:
    """Return the divergences left if each step starts from the reference's parameters.

    With `state`, each step also starts from the reference's optimizer state.
    """
    forced = start_steps_from(values_at_steps(diverged.scenario), alter, state=state)
    result = Runner(world=world, deadline=deadline, alter=forced).run(diverged.scenario)
    return compare(diverged.reference, result.run.values).divergences


def _sentence(num_steps: int, divergences_with: Callable[[bool], tuple[Divergence, ...]]) -> str:
    found = divergences_with(True)
    wrong = [step for step in range(num_steps) if any(each.step == step for each in found)]
    if not wrong:
        carried = "the optimizer state carried over is" if divergences_with(False) else "the parameters carried over are"
        return f"between steps: each step is right {FROM_REFERENCE}, so {carried} wrong"
    if len(wrong) == num_steps:
        return f"in every step, also {FROM_REFERENCE}"
    right = [step for step in range(num_steps) if step not in wrong]
    first = next(each for each in found if each.step == wrong[0])
    what = first.tensor if first.phase is Phase.LOSS else f"{first.phase.value} of {first.tensor}"
    where = f"in {_numbered(wrong)} ({what}), also {FROM_REFERENCE}"
    return f"{where}; {_numbered(right)} {'is' if len(right) == 1 else 'are'} right"


def _numbered(steps: list[int]) -> str:
    return f"step{'' if len(steps) == 1 else 's'} {join_words([str(step) for step in steps])}"


class NotWritable(EquivCheckError):
    """A rank's tensor cannot be overwritten, because its size does not fit its placements. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """The reference's values at the start of a step."""

    parameters: TensorsByName
    """Full parameters by name."""
    state: TensorsByName
    """Optimizer state, with names such as ``parameter/key``. Empty before the first update."""
    types: dict[str, torch.dtype]
    """Element type of each tensor in `state`."""


def values_at_steps(scenario: Scenario) -> list[StepValues]:
    """Train on one device, and return the values at the start of each step."""
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
    """Return a change to a rank's `Setup`: each step starts from the reference's parameters.

    With `state`, it also starts from the reference's optimizer state. `alter` is applied first, so its hooks run before the one
    that copies the reference's values.
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
    """Create optimizer state that the reference already has at this step."""
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
        raise NotWritable(f"{pieces[0].name} has {local.numel()} elements on a rank, but its placements need {expected}")
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
