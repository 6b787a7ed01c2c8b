"""Layers that tensor parallelism splits, summed wrongly."""

from __future__ import annotations

from equivcheck.export.bugs.snippet import Snippet
from equivcheck.layouts.base.limits.limit import parallelism_of
from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.scenario import Split, TensorParallel


def _row_linears(draft: Draft) -> list[tuple[int, str]]:
    """The indices of layers split by rows, each with the names of its linears in the script."""
    scenario = draft.scenario
    plan, layers = parallelism_of(scenario.layout, TensorParallel).plan, scenario.training.model.layers
    found = [(index, "linear") for index, entry in enumerate(plan) if entry.split is Split.ROW]
    found += [(index, "auxiliary") for index, _ in found if layers[index].auxiliary is not None]
    return [(index, draft.form.paths[f"layers.{index}.{owner}"]) for index, owner in found]


def _row_output_averaged(draft: Draft) -> None:
    for _, path in _row_linears(draft):
        halve = "lambda _, inputs: inputs[0] / inputs[0].device_mesh.size()"
        draft.add(LoopPosition.WRAP, f'model.get_submodule("{path}").register_forward_pre_hook({halve})')


def _row_bias_on_every_rank(draft: Draft) -> None:
    layers = draft.scenario.training.model.layers
    paths = [path for index, path in _row_linears(draft) if layers[index].bias and not path.endswith("auxiliary")]
    more = "outputs + (outputs.device_mesh.size() - 1) * linear.bias.detach()"
    for path in paths:
        hook = f"lambda linear, _, outputs: {more}"
        draft.add(LoopPosition.WRAP, f'model.get_submodule("{path}").register_forward_hook({hook}, prepend=True)')


SNIPPETS: dict[str, Snippet] = {
    "row_output_averaged": _row_output_averaged,
    "row_bias_on_every_rank": _row_bias_on_every_rank,
}
"""By the name of the mutant."""
