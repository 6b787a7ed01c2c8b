"""Limits for explicit data parallelism."""

from __future__ import annotations

from equivcheck.layouts.base.limits.data_parallel import EVEN_ROWS
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit
from equivcheck.layouts.base.limits.repairs import only_one
from equivcheck.scenario import ContextParallel, ExpertParallel, LocalDataParallel, LocalTensorParallel, Pipeline
from equivcheck.scenario.mesh import DP

LIMITS: tuple[Limit, ...] = (EVEN_ROWS,)


_OF_PLAIN_TENSORS = (LocalDataParallel, LocalTensorParallel, ContextParallel, ExpertParallel, Pipeline)

OF_PLAIN_TENSORS = LayoutLimit(
    reason="local_data_parallel: other parallelisms than local_tensor_parallel, context parallelism, expert parallelism and "
    "pipelines are not supported together with it: it averages plain gradients, which must have the same shape on all its ranks",
    applies=lambda layout: not all(isinstance(each, _OF_PLAIN_TENSORS) for each in layout.parallelisms),
    repair=lambda layout: only_one(layout, LocalDataParallel, DP),
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (OF_PLAIN_TENSORS,)
