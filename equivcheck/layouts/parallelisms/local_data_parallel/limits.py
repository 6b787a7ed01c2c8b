"""What data parallelism by hand cannot run."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.data_parallel import EVEN_ROWS
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, parallelism_of
from equivcheck.scenario import ContextParallel, ExpertParallel, Layout, LocalDataParallel, LocalTensorParallel
from equivcheck.scenario.mesh import DP

LIMITS: tuple[Limit, ...] = (EVEN_ROWS,)


def _alone(layout: Layout) -> Layout:
    mesh = replace(layout.mesh, axes=tuple(axis for axis in layout.mesh.axes if axis.name == DP))
    return replace(layout, mesh=mesh, parallelisms=(parallelism_of(layout, LocalDataParallel),))


_OF_PLAIN_TENSORS = (LocalDataParallel, LocalTensorParallel, ContextParallel, ExpertParallel)

OF_PLAIN_TENSORS = LayoutLimit(
    reason="local_data_parallel: a parallelism other than local_tensor_parallel, context parallelism or expert parallelism "
    "next to it is not supported: it averages gradients that are plain tensors, as many on each of its ranks",
    applies=lambda layout: not all(isinstance(each, _OF_PLAIN_TENSORS) for each in layout.parallelisms),
    repair=_alone,
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (OF_PLAIN_TENSORS,)
