"""Chunks that a rank splits itself and passes to its schedule.

torch 2.14 added arguments for them. Earlier versions need the private `_step_microbatches`; tested with torch 2.9 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

TAKES_CHUNKS = ">=2.14"
"""Versions in which `step` takes chunks."""


def split_into_chunks(
    inputs: torch.Tensor | None, masks: Mapping[str, torch.Tensor], targets: torch.Tensor | None, count: int
) -> tuple[list[Any], list[Any], list[Any] | None]:
    """Return each chunk's positional arguments, keyword arguments and targets, as lists. Padding has no targets."""
    first = [()] * count if inputs is None else [(chunk,) for chunk in inputs.tensor_split(count)]
    split = {name: mask.tensor_split(count) for name, mask in masks.items()}
    named = [{name: chunks[number] for name, chunks in split.items()} for number in range(count)]
    return first, named, None if targets is None else list(targets.tensor_split(count))


def step_on_chunks(
    schedule: Any, chunks: tuple[list[Any], list[Any], list[Any] | None], losses: list[torch.Tensor], **options: bool
) -> None:
    """Run a schedule on chunks from `split_into_chunks`, and collect their losses."""
    first, named, targets = chunks
    schedule.step(arg_mbs=first, kwarg_mbs=named, target_mbs=targets, losses=losses, **options)


def step_on_chunks_privately(
    schedule: Any, chunks: tuple[list[Any], list[Any], list[Any] | None], losses: list[torch.Tensor]
) -> None:
    """Run a schedule like `step_on_chunks`, in torch versions whose `step` takes no chunks."""
    first, named, targets = chunks
    for stage in schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(first, named, targets, losses)
