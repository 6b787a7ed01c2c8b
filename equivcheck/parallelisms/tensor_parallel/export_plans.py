"""What a tensor-parallel plan does to the parameters of a script."""

from __future__ import annotations

from equivcheck.layers.parameters import parameters_of
from equivcheck.layouts.limits.limit import parallelism_of
from equivcheck.layouts.partition import cut_dim
from equivcheck.layouts.script.draft import Draft
from equivcheck.scenario import TensorParallel


def sharded_dims(draft: Draft) -> str:
    """The dims along which parameters are cut, by name, as code."""
    plan = parallelism_of(draft.scenario.layout, TensorParallel)
    parameters = parameters_of(draft.scenario.training.model)
    dims = {draft.form.name_of(found.full_name): cut_dim(plan, found) for found in parameters}
    items = ", ".join(f'"{name}": {dim}' for name, dim in dims.items() if dim is not None)
    return f"{{{items}}}"
