"""Finds the state that a checkpoint loses: compares it before saving and after loading, then repeats the loss on one device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from equivcheck.diagnosis.agreement import num_agreeing_moments
from equivcheck.diagnosis.evidence import ComparedRanks
from equivcheck.diagnosis.words import join_words, name_ranks, tensors
from equivcheck.layouts.composition.running import RanksResult
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.reference import Reference
from equivcheck.user.reference import SingleDeviceRun, trace_of
from equivcheck.user.resuming.parts import Part, first_part, second_part
from equivcheck.user.traces.names import TensorNames
from equivcheck.user.traces.optimizers import optimizers_in
from equivcheck.user.traces.settings import TrainingState, UserTrace, other_settings
from equivcheck.worlds.trace.moments import moments, moments_of_steps
from equivcheck.worlds.trace.pieces import assemble_tensors, select_piece, values_by_piece
from equivcheck.worlds.trace.tensors import Vector
from equivcheck.worlds.trace.trace import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLoss:
    """The state that ranks lose when they save and load a checkpoint."""

    sentence: str
    """The lost state in words."""
    reproduces: bool
    """Whether this loss explains everything: one device that continues from the ranks' state gives all their values."""


NOTHING_LOST = (
    "the checkpoint lost nothing: after loading it, parameters, buffers, optimizer and scheduler equal those before saving it. "
    "Look for the mistake in the steps after it"
)
"""Hint for ranks that diverge after a correct restart."""


def loss_at_restart(run: SingleDeviceRun, reference: Reference, result: RanksResult) -> RestartLoss:
    """Find the state that ranks lost between saving and loading a checkpoint."""
    lost = _lost_between(*(_checkpoints(traces) for traces in (result.before, result.run.values)))
    items = lost.items
    if not items:
        return RestartLoss(sentence=NOTHING_LOST, reproduces=False)
    if _reproduces(run, reference, result, lost):
        return RestartLoss(sentence=f"saving and loading the checkpoint does not restore {'; '.join(items)}", reproduces=True)
    where = "" if len(lost.ranks) == len(result.run.values) else f" on {name_ranks(lost.ranks)}"
    text = f"after loading the checkpoint{where}, some state differs from the state before saving: {'; '.join(items)}"
    return RestartLoss(sentence=text, reproduces=False)


def _checkpoints(traces: Sequence[Any]) -> list[TrainingState]:
    return [trace.checkpoint for trace in traces]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lost:
    """State after loading that differs from the state before saving, by name."""

    parameters: Mapping[str, Vector | None]
    """Full values after loading; None for a missing tensor."""
    buffers: Mapping[str, Vector | None]
    """Full values after loading; None for a missing tensor."""
    state: Mapping[str, Vector | None]
    """Full values after loading; None for a missing tensor."""
    settings: Mapping[str, Mapping[str, tuple[float, float]]]
    """Numbers before and after, by parameter and setting."""
    progress: Mapping[str, tuple[float, float | None]]
    """Numbers before and after in the scheduler's state; None for a missing number."""
    ranks: tuple[int, ...]
    """Ranks whose state differs."""

    @property
    def items(self) -> list[str]:
        """Return a phrase for each kind of lost state."""
        found = [f"parameter{'s' * (len(self.parameters) > 1)} {tensors(list(self.parameters))}"] if self.parameters else []
        if self.state:
            owners, keys = (list(dict.fromkeys(name.rpartition("/")[part] for name in self.state)) for part in (0, 2))
            found.append(f"the optimizer's {join_words(keys)} of {tensors(owners)}")
        if self.buffers:
            found.append(f"buffer{'s' * (len(self.buffers) > 1)} {tensors(list(self.buffers))}")
        settings = {key: numbers for each in self.settings.values() for key, numbers in each.items()}
        for who, numbers in (("optimizer", settings), ("scheduler", self.progress)):
            found += [f"the {who}'s {_numbers(numbers)}"] if numbers else []
        return found


def _lost_between(saved: Sequence[TrainingState], loaded: Sequence[TrainingState]) -> _Lost:
    ranks: set[int] = set()
    tensors = {
        kind: _differing([getattr(each, kind) for each in saved], [getattr(each, kind) for each in loaded], ranks)
        for kind in ("parameters", "buffers", "state")
    }
    elsewhere = _state_on_other_ranks(saved, loaded)
    ranks |= set(elsewhere)
    tensors["state"] |= {name: tensors["state"].get(name) for names in elsewhere.values() for name in sorted(names)}
    before = {name: numbers for each in saved for name, numbers in each.settings.items()}
    settings: dict[str, dict[str, tuple[float, float]]] = {}
    progress: dict[str, tuple[float, float | None]] = {}
    for rank, each in enumerate(loaded):
        for name, numbers in each.settings.items():
            own = before.get(name, {})
            changed = {key: (own[key], value) for key, value in numbers.items() if own.get(key, value) != value}
            settings |= {name: changed} if changed else {}
            ranks |= {rank} if changed else set()
        moved = {key: (old, each.progress.get(key)) for key, old in saved[0].progress.items() if each.progress.get(key) != old}
        progress |= moved
        ranks |= {rank} if moved else set()
    return _Lost(**tensors, settings=settings, progress=progress, ranks=tuple(sorted(ranks)))


def _differing(saved: Sequence[Snapshot], loaded: Sequence[Snapshot], ranks: set[int]) -> dict[str, Vector | None]:
    """Return the full values of tensors that are missing or differ after loading. Adds the ranks with other values to `ranks`."""
    before, after = assemble_tensors(saved), assemble_tensors(loaded)
    found: dict[str, Vector | None] = {name: None for name in before if name not in after}
    ranks |= set(range(len(loaded))) if found else set()
    for rank, snapshot in enumerate(loaded):
        for piece, values in values_by_piece(snapshot):
            right = before.get(piece.name)
            if right is None or values is None or right.shape != piece.shape:
                continue
            if not np.array_equal(values, select_piece(right, piece), equal_nan=True):
                found[piece.name] = after[piece.name]
                ranks.add(rank)
    return found


def _state_on_other_ranks(saved: Sequence[TrainingState], loaded: Sequence[TrainingState]) -> dict[int, set[str]]:
    """Return optimizer state that a rank had before saving, and that only other ranks have after loading.

    The rank still has the parameter.
    """
    found: dict[int, set[str]] = {}
    for rank, (before, after) in enumerate(zip(saved, loaded, strict=False)):
        held = {piece.name for piece in after.parameters.pieces}
        lacks = {piece.name for piece in before.state.pieces} - {piece.name for piece in after.state.pieces}
        found[rank] = {name for name in lacks if name.rpartition("/")[0] in held}
    return {rank: names for rank, names in found.items() if names}


def _reproduces(run: SingleDeviceRun, reference: Reference, result: RanksResult, lost: _Lost) -> bool:
    """Whether one device that continues from the ranks' state after loading reproduces all values on the ranks."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trace = _continued(run, lost)
    except Exception:  # the optimizer or the user's code rejects such a state
        return False
    found = (*moments_of_steps(result.before), *zip(*map(moments, result.run.values), strict=True))
    diverged = ComparedRanks(
        reference=reference,
        traces=result.run.values,
        found=found,
        divergences=compare(reference, result.run.values, result.before).divergences,
        eps=run.eps,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns about a moment without tensors
        num_agreeing = num_agreeing_moments(diverged, [trace])
    return num_agreeing == len(found) and other_settings(trace, result.run.values, reference.noise_limit) is None


def _continued(run: SingleDeviceRun, lost: _Lost) -> UserTrace:
    """Train on one device with a break in which the given state is lost."""
    kept: dict[str, Any] = {}

    def save(model: nn.Module, optimizer: Any, scheduler: Any, _folder: Path) -> None:
        kept.update(model=model, optimizer=optimizer, scheduler=scheduler)

    def load(model: nn.Module, optimizer: Any, scheduler: Any, _folder: Path) -> None:
        for kind, values in (("parameters", lost.parameters), ("buffers", lost.buffers)):
            old, new = (dict(getattr(TensorNames(each), kind)(each)) for each in (kept["model"], model))
            _restore_tensors(old, new, values)
        if scheduler is not None and not lost.progress:
            scheduler.load_state_dict(kept["scheduler"].state_dict())
        names = {id(parameter): name for name, parameter in TensorNames(kept["model"]).parameters(kept["model"])}
        for before, after in zip(optimizers_in(kept["optimizer"]), optimizers_in(optimizer), strict=True):
            _restore_optimizer(before, after, names, lost)

    task, resume = run.task, run.task.resume
    assert resume is not None, "asked for only with a checkpoint"
    first = trace_of(first_part(task), seed=task.seed, part=Part(save=save))
    second = trace_of(second_part(task), seed=task.seed, part=Part(first_step=resume.after, load=load))
    return replace(second, steps=(*first.steps, *second.steps))


def _restore_tensors(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], lost: Mapping[str, Vector | None]) -> None:
    with torch.no_grad():
        for name, tensor in new.items():
            value = lost.get(name)
            tensor.copy_(old[name] if value is None else torch.from_numpy(value))


def _restore_optimizer(old: torch.optim.Optimizer, new: torch.optim.Optimizer, names: Mapping[int, str], lost: _Lost) -> None:
    for before, after in zip(old.param_groups, new.param_groups, strict=True):
        owners = [names.get(id(parameter), "") for parameter in before["params"]]
        numbers = {key: value for name in owners for key, (_, value) in lost.settings.get(name, {}).items()}
        after.update({key: copy.deepcopy(value) for key, value in before.items() if key != "params"} | numbers)
        for one, other in zip(before["params"], after["params"], strict=True):
            state = {
                key: _state_value(value, f"{names[id(one)]}/{key}", lost.state)
                for key, value in old.state[one].items()
                if lost.state.get(f"{names[id(one)]}/{key}", value) is not None
            }
            if state:
                new.state[other] = state


def _state_value(value: Any, name: str, lost: Mapping[str, Vector | None]) -> Any:
    other = lost.get(name)
    if other is None:
        return copy.deepcopy(value)
    return torch.from_numpy(other).to(value).reshape(value.shape) if isinstance(value, torch.Tensor) else type(value)(other)


def _numbers(values: Mapping[str, tuple[float, float | None]]) -> str:
    after = {key: "missing" if new is None else f"{new:g}" for key, (_, new) in values.items()}
    return join_words([f"{key} ({after[key]} instead of {old:g})" for key, (old, _) in values.items()])
