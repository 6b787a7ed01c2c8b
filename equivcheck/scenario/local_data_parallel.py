"""Data parallelism by hand."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.mesh import DP
from equivcheck.scenario.noun import noun
from equivcheck.scenario.parallelism_base import Parallelism


@noun
class LocalDataParallel(Parallelism):
    """Gradients of plain tensors averaged by hand when the last backward of a step is through, as loops without a wrapper do."""

    tag: ClassVar[str] = "local_data_parallel"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((DP,),)
    flat_buffer: bool = False
    """Whether one all-reduce, of a buffer that they are copied to and from, sums all gradients, rather than one for each."""
