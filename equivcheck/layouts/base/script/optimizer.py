"""The optimizer, its parameter groups and its schedule, as code."""

from __future__ import annotations

import inspect
from dataclasses import fields

from equivcheck.errors import UsageError
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.text import block, call, tuple_code
from equivcheck.scenario import ParameterGroup, Training
from equivcheck.training.material import material
from equivcheck.training.update.optimizer import OptimizerParts, group_of, optimizer_parts


def optimizer_lines(draft: Draft) -> list[str]:
    """Return lines to build the optimizer and its learning rate schedule."""
    training = draft.scenario.training
    in_parallel, alone = _built(draft, shared=True), _built(draft, shared=False)
    lines = alone if in_parallel == alone else [*block("if parallel:", in_parallel), *block("else:", alone)]
    return [*lines, *_schedule(training), *block("if parallel:", draft.lines[LoopPosition.AFTER_OPTIMIZER])]


def _built(draft: Draft, *, shared: bool) -> list[str]:
    """Lines that build the optimizer. With `shared`, use the parallel run's optimizer, such as `ZeroRedundancyOptimizer`."""
    training = draft.scenario.training
    parts = _parts(training)
    kind, settings = f"torch.optim.{parts.kind.__name__}", _settings(parts)
    parameters = "groups" if training.groups else draft.parameters
    built = call(kind, parameters, **settings)
    if shared and draft.shared_updates is not None:
        built = call("ZeroRedundancyOptimizer", parameters, optimizer_class=kind, **draft.shared_updates, **settings)
    if shared and draft.optimizer is not None:
        own, arguments = draft.optimizer
        built = call(own, parameters, **arguments, **settings)
    return [*(_groups(draft, training) if training.groups else []), f"optimizer = {built}"]


def _parts(training: Training) -> OptimizerParts:
    try:
        return optimizer_parts(training, ())
    except UsageError as error:
        raise refuse(f"optimizer {type(training.optimizer).__name__}", str(error)) from None


def _settings(parts: OptimizerParts) -> dict[str, str]:
    """Learning rate and settings that differ from torch's defaults. On CPU the defaults select no implementation."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(parts.kind).parameters.items()}
    usual = defaults | {"foreach": False, "fused": False, "lr": None}
    return {name: repr(value) for name, value in parts.arguments.items() if value != usual[name]}


def _groups(draft: Draft, training: Training) -> list[str]:
    members: dict[ParameterGroup | None, list[str]] = {None: [], **{group: [] for group in training.groups}}
    for name in material(training).parameters:
        members[group_of(training, name)].append(f'"{draft.form.name_of(name)}"')
    variables, everything = draft.names
    others = [name for group, names in members.items() for name in names if group is not None]
    groups = []
    for group, names in members.items():
        if not names:
            continue
        chosen = f"in {tuple_code(names)}" if group is not None else f"not in {tuple_code(others)}"
        condition = f" if name {chosen}" if group is not None or others else ""
        groups.append(f'{{"params": [parameter for {variables} in {everything}{condition}]{_own(training, group)}}}')
    return ["groups = [", *(f"    {group}," for group in groups), "]"]


def _own(training: Training, group: ParameterGroup | None) -> str:
    if group is None:
        return ""
    decay = f', "weight_decay": {group.weight_decay!r}' if training.optimizer.decays else ""
    return f', "lr": {training.optimizer.lr * group.lr_factor!r}{decay}'


def _schedule(training: Training) -> list[str]:
    if training.schedule is None:
        return []
    settings = {field.name: repr(getattr(training.schedule, field.name)) for field in fields(training.schedule)}
    return [f"schedule = {call(f'torch.optim.lr_scheduler.{type(training.schedule).__name__}', 'optimizer', **settings)}"]
