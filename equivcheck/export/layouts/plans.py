"""What a tensor-parallel plan does to the parameters of a script."""

from __future__ import annotations

from equivcheck.export.draft import Draft
from equivcheck.layouts.limits import parallelism_of
from equivcheck.scenario import Split, TensorParallel


def sharded_dims(draft: Draft) -> str:
    """The dims along which parameters are cut, by name, as code."""
    form, model = draft.form, draft.scenario.training.model
    plan = parallelism_of(draft.scenario.layout, TensorParallel).plan
    dims = {}
    for index, (layer, entry) in enumerate(zip(model.layers, plan, strict=True)):
        if entry.split in (Split.COLUMN, Split.ROW):
            linears = ("linear", "side") if layer.side is not None else ("linear",)
            for linear in linears:
                dims[form.name_of(f"layers.{index}.{linear}.weight")] = 0 if entry.split is Split.COLUMN else 1
            if layer.bias and entry.split is Split.COLUMN:
                dims[form.name_of(f"layers.{index}.linear.bias")] = 0
    items = ", ".join(f'"{name}": {dim}' for name, dim in dims.items())
    return f"{{{items}}}"
