"""Along which dims layouts cut trained matrices, and over how many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from equivcheck.scenario import FSDP2, SPMD, Distribution, LayerPlan, Layout, Parallelism, Split, TensorParallel, Training
from equivcheck.scenario.mesh import DP, SHARD, TP


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A dim of a matrix that DTensor has cut, be it over one rank."""

    size: int
    """Length of the dim."""
    ranks: int
    """Over how many ranks."""


def matrix_cuts(training: Training, layout: Layout) -> Iterator[Cut]:
    """Every cut of every trained matrix."""
    model = training.model
    for index, layer in enumerate(model.layers):
        if not layer.frozen and (layer.shares is None or layer.side is not None):
            for dim, size in enumerate((layer.width, model.inputs(index))):
                cutting = [parallelism for parallelism in layout.parallelisms if _cuts(parallelism, index, dim)]
                if cutting:
                    axes = [name for parallelism in cutting for name in layout.axes_of(parallelism) if name in (DP, SHARD, TP)]
                    yield Cut(size=size, ranks=layout.mesh.size(*axes))


def _cuts(parallelism: Parallelism, index: int, dim: int) -> bool:
    if isinstance(parallelism, TensorParallel):
        plan = parallelism.plan[index] if index < len(parallelism.plan) else LayerPlan()
        return plan.split is (Split.ROW if dim else Split.COLUMN)
    return dim == 0 and (is_sharded_by_rows(parallelism) or isinstance(parallelism, FSDP2))


def is_sharded_by_rows(parallelism: Parallelism) -> bool:
    """Whether a parallelism is DTensor SPMD with parameters sharded by their first dim."""
    return isinstance(parallelism, SPMD) and parallelism.distribution is Distribution.FULLY_SHARD
