"""What DTensor propagation cannot run."""

from __future__ import annotations

from equivcheck.layouts.limits.data_parallel import EVEN_ROWS
from equivcheck.layouts.limits.execution import NO_COUNTS_IN_GRAPHS
from equivcheck.layouts.limits.limit import Limit
from equivcheck.layouts.limits.optimizers import DTENSOR_OPTIMIZERS, WHOLE_PARAMETERS

LIMITS: tuple[Limit, ...] = (EVEN_ROWS, *DTENSOR_OPTIMIZERS, *WHOLE_PARAMETERS, NO_COUNTS_IN_GRAPHS)
