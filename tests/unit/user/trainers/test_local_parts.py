"""Places of plain chunks in full tensors."""

from __future__ import annotations

import torch

from equivcheck.user.trainers.local_parts import chunk_parts, local_parts


def test_a_chunk_begins_after_the_chunks_of_earlier_ranks() -> None:
    """Along the dim whose size differs. Full tensors, numbers, vectors and state by key are placed too."""
    tensors = {
        "rows": torch.ones(2, 6),
        "columns/exp_avg": torch.ones(4, 3),
        "full": torch.ones(4, 6),
        "full/step": torch.ones(()),
        "rows/sums": torch.ones(2),
    }
    shapes = dict.fromkeys(("rows", "columns", "full"), (4, 6))
    placed = {part.name: (part.shape, part.start) for part in chunk_parts(local_parts(tensors.items()), shapes, rank=1)}
    assert placed == {
        "rows": ((4, 6), (2, 0)),
        "columns/exp_avg": ((4, 6), (0, 3)),
        "full": ((4, 6), ()),
        "full/step": ((), ()),
        "rows/sums": ((2,), ()),
    }
