"""Parallelisms: one class for each, with its options."""

from __future__ import annotations

from equivcheck.scenario.parallelisms.base import Parallelism
from equivcheck.scenario.parallelisms.context_parallel import ContextParallel
from equivcheck.scenario.parallelisms.data_parallel import DDP, FSDP1, FSDP2, SPMD, LocalDataParallel, Replicate
from equivcheck.scenario.parallelisms.expert_parallel import ExpertParallel
from equivcheck.scenario.parallelisms.pipeline import Pipeline
from equivcheck.scenario.parallelisms.tensor_parallel import LocalTensorParallel, TensorParallel

PARALLELISMS: tuple[type[Parallelism], ...] = (
    DDP,
    Replicate,
    FSDP1,
    FSDP2,
    TensorParallel,
    SPMD,
    Pipeline,
    LocalTensorParallel,
    ContextParallel,
    ExpertParallel,
    LocalDataParallel,
)
"""All built-in parallelisms, simplest first."""
