"""Counts of chosen experts in a script: for the load-balancing loss, and for the routers' bias."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.layouts.base.expected_calls.shared import AXES
from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.loop import part_of_step
from equivcheck.layouts.base.script.mesh import mesh_of, repr_of
from equivcheck.scenario.mesh import CP

_BALANCE_LOSS = (
    "def balance_loss(model, groups, positions):",
    '    """Sum the load-balancing losses of all layers, with counts over `groups` and a mean over positions."""',
    "    total = 0.0",
    "    for layer in model.modules():",
    '        if "load" in vars(layer):',
    "            coefficient, counts, shares = layer.load",
    "            for group in {groups}:",
    "                dist.all_reduce(counts, group=group)",
    "            fractions = counts / counts.sum(-1, keepdim=True)",
    "            total = total + coefficient * counts.shape[-1] * (fractions * shares).sum()",
    "    return total / positions",
)
_COUNT_CHOICES = (
    "def count_choices(model):",
    '    """Add the counts of chosen experts in the last forward to the counts of the step."""',
    "    for layer in model.modules():",
    '        if "router_bias_rate" in vars(layer):',
    "            layer.counts_of_step = layer.counts_of_step + layer.counts",
)
_UPDATE_BIASES = (
    "def update_router_biases(model, groups):",
    '    """Let experts with fewer positions than the mean be chosen more often, with counts over `groups`."""',
    "    for layer in model.modules():",
    '        if "router_bias_rate" in vars(layer):',
    "            counts, layer.counts_of_step = {counts}, 0.0",
    "            for group in groups:",
    "                dist.all_reduce(counts, group=group)",
    "            layer.router.expert_bias += layer.router_bias_rate * torch.sign(counts.mean() - counts)",
)


def add_counts(draft: Draft) -> None:
    """Let the script count chosen experts over all ranks, if a loss or a router's bias depends on these counts."""
    training = draft.scenario.training
    if not training.model.balances and not training.model.has_router_bias:
        return
    groups = _groups(draft)
    if groups:
        draft.before_wrap.append("counting_groups = []  # ranks with different parts of a microbatch")
        draft.add(LoopPosition.WRAP, *(f"counting_groups.append({group})" for group in groups.values()))
    given = "counting_groups" if groups else "()"
    if training.model.balances:
        draft.definitions.append([line.replace("{groups}", _summed_over(draft, list(groups))) for line in _BALANCE_LOSS])
        positions = f"inputs.shape[{training.data.batch_dim}]" + (f" * {training.model.length}" if training.model.length else "")
        draft.added = f"balance_loss(model, {given}, {positions}){part_of_step(draft)}"
    if training.model.has_router_bias:
        propagates = any(each.propagates_placements for each in draft.scenario.layout.parallelisms)
        counts = "full(layer.counts_of_step)" if propagates else "layer.counts_of_step"
        draft.definitions += [list(_COUNT_CHOICES), [line.replace("{counts}", counts) for line in _UPDATE_BIASES]]
        draft.counts_choices, draft.after_backward = True, [f"update_router_biases(model, {given})"]


def _summed_over(draft: Draft, axes: Sequence[str]) -> str:
    """Return an expression for the groups over which a layer sums its counts, in the list ``groups``, one for each of `axes`.

    A layer that counts in each sequence sums over context-parallel ranks only.
    """
    if not any(layer.balance_per_sequence for layer in draft.scenario.training.model.layers):
        return "groups"
    number = axes.index(CP) if CP in axes else None
    return f"groups if counts.ndim == 1 else {'()' if number is None else f'groups[{number}:{number + 1}]'}"


def _groups(draft: Draft) -> dict[str, str]:
    """Return expressions for the process groups over which ranks sum counts, by mesh axis. DTensor reduces its own counts."""
    layout, groups = draft.scenario.layout, dict[str, str]()
    for parallelism in layout.parallelisms:
        names = [name for name in layout.axes_of(parallelism) if name in AXES and layout.mesh.size(name) > 1]
        if not parallelism.propagates_placements:
            mesh = mesh_of(draft, parallelism) if names else ""
            several = len(layout.axes_of(parallelism)) > 1
            groups |= {name: f"{mesh}.get_group({repr_of(name) if several else ''})" for name in names}
    return groups
