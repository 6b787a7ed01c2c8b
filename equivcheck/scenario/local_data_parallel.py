"""Data parallelism without a wrapper."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.mesh import DP
from equivcheck.scenario.noun import frozen_dataclass, option
from equivcheck.scenario.parallelism_base import Parallelism


@frozen_dataclass
class LocalDataParallel(Parallelism):
    """Average gradients of plain tensors explicitly after the last backward in a step, as training loops without a wrapper do."""

    tag: ClassVar[str] = "local_data_parallel"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,),)
    flat_buffer: bool = option(default=False, limits=False)
    """Whether one all-reduce on a flat buffer sums all gradients, instead of one all-reduce per parameter."""
