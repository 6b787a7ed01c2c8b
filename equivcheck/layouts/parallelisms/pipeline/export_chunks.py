"""Writes chunks that ranks split themselves into a script."""

from __future__ import annotations

from collections.abc import Callable

from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.text import block, call, source_of
from equivcheck.layouts.parallelisms.pipeline import presplit
from equivcheck.scenario import Pipeline
from equivcheck.system.torch_version import is_torch_in


def has_equal_chunks(draft: Draft) -> bool:
    """Whether no chunk needs padding."""
    return draft.scenario.layout.has_equal_chunks(draft.scenario.training.data.microbatches)


def define_chunks(draft: Draft, parallelism: Pipeline) -> None:
    """Define how a schedule gets chunks, and let the script pad them before other parallelisms shard them."""
    draft.need("collections.abc", "Mapping")
    draft.need("typing", "Any")
    draft.definitions += [source_of(presplit.split_into_chunks), source_of(_step())]
    if has_equal_chunks(draft):
        return
    body = [
        '"""Repeat the last row of chunks that have one row less than the first chunk."""',
        f"chunks = rows.tensor_split({parallelism.num_chunks})",
        "last_rows = [chunk[-1:].expand(len(chunks[0]) - len(chunk), *chunk.shape[1:]) for chunk in chunks]",
        "return torch.cat([part for pair in zip(chunks, last_rows, strict=True) for part in pair])",
    ]
    draft.definitions.append(block("def pad_chunks(rows: torch.Tensor) -> torch.Tensor:", body))
    masks = ["masks = [pad_chunks(mask) for mask in masks]"] * ("masks" in draft.form.extras)
    draft.lines[LoopPosition.TAKE][:0] = ["inputs = pad_chunks(inputs)", *masks]


def step_code(draft: Draft, parallelism: Pipeline, schedule: str, inputs: str, targets: str, **options: str) -> str:
    """Return code that splits a microbatch into chunks and runs the schedule on them."""
    masks = '{f"mask_{number}": mask for number, mask in enumerate(masks)}' if "masks" in draft.form.extras else "{}"
    chunks = call("split_into_chunks", inputs, masks, targets, str(parallelism.num_chunks))
    return call(_step().__name__, schedule, chunks, "losses", **options)


def _step() -> Callable[..., None]:
    return presplit.step_on_chunks if is_torch_in(presplit.TAKES_CHUNKS) else presplit.step_on_chunks_privately
