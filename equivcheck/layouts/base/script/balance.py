"""The experts' load-balancing loss in a script. Ranks sum the counts of chosen experts."""

from __future__ import annotations

from equivcheck.layouts.base.expected_calls.shared import AXES
from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.loop import part_of_step
from equivcheck.layouts.base.script.mesh import mesh_of, repr_of
from equivcheck.scenario import SPMD

_FUNCTION = (
    "def balance_loss(model, groups, positions):",
    '    """Sum the load-balancing losses of all layers, with counts over `groups` and a mean over positions."""',
    "    total = 0.0",
    "    for layer in model.modules():",
    '        if "load" in vars(layer):',
    "            coefficient, counts, shares = layer.load",
    "            for group in groups:",
    "                dist.all_reduce(counts, group=group)",
    "            total = total + coefficient * counts.numel() * (counts / counts.sum() * shares).sum()",
    "    return total / positions",
)


def add_balance(draft: Draft) -> None:
    """Add the load-balancing loss to the output loss, if any layer has one."""
    training = draft.scenario.training
    if not training.model.balances:
        return
    draft.definitions.append(list(_FUNCTION))
    groups = _groups(draft)
    if groups:
        draft.before_wrap.append("counting_groups = []  # ranks with different parts of a microbatch")
        draft.add(LoopPosition.WRAP, *(f"counting_groups.append({group})" for group in groups))
    positions = f"inputs.shape[{training.data.batch_dim}]" + (f" * {training.model.length}" if training.model.length else "")
    draft.added = f"balance_loss(model, {'counting_groups' if groups else '()'}, {positions}){part_of_step(draft)}"


def _groups(draft: Draft) -> list[str]:
    layout, found = draft.scenario.layout, []
    for parallelism in layout.parallelisms:
        names = [name for name in layout.axes_of(parallelism) if name in AXES and layout.mesh.size(name) > 1]
        if not isinstance(parallelism, SPMD):  # whose counts are DTensors
            mesh = mesh_of(draft, parallelism) if names else ""
            several = len(layout.axes_of(parallelism)) > 1
            found += [f"{mesh}.get_group({repr_of(name) if several else ''})" for name in names]
    return found
