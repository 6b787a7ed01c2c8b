"""What expert parallelism cannot run."""

from __future__ import annotations

from equivcheck.layers.parameters import parameters_of
from equivcheck.layouts.limits.data_parallel import EVEN_ROWS
from equivcheck.layouts.limits.execution import uncompiled
from equivcheck.layouts.limits.limit import LayoutLimit, Limit, parallelism_of
from equivcheck.layouts.limits.optimizers import elementwise
from equivcheck.layouts.partition import cut_dim
from equivcheck.scenario import ExpertParallel, Layout, Training
from equivcheck.scenario.mesh import EP


def _updates_parts(training: Training, layout: Layout) -> bool:
    parallelism = parallelism_of(layout, ExpertParallel)
    is_cut = any(each.trained and cut_dim(parallelism, each) is not None for each in parameters_of(training.model))
    return not training.optimizer.elementwise and layout.mesh.size(EP) > 1 and is_cut


WHOLE_PARAMETERS = Limit(
    reason="expert parallelism: an optimizer that is not elementwise sees a rank's own experts, a part of a parameter",
    applies=_updates_parts,
    repair=elementwise,
)

EAGER = LayoutLimit(
    reason="expert parallelism: how many rows are sent depends on values, and so do shapes, which no graph holds",
    applies=lambda layout: layout.execution.is_compiled,
    repair=uncompiled,
)

LIMITS: tuple[Limit, ...] = (EVEN_ROWS, WHOLE_PARAMETERS)
LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (EAGER,)
