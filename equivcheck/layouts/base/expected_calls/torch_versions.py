"""Version ranges in which torch's calls differ."""

from __future__ import annotations

WEIGHT_GATHERED_FOR_INPUT_GRADIENT = "<2.14"
"""In these versions, backward gathers a linear's weight again if it has fewer features than ranks.
Later versions keep the weight from forward, and gather it again only if forward is recomputed."""

SUM_OF_NORMS_FIRST = "<2.10"
"""In these versions, `clip_grad_norm_` combines all DTensor norms before it reduces them over ranks.
Later versions reduce all norms."""

LARGEST_NORM_FIRST = "!=2.10.*"
"""In these versions, `clip_grad_norm_` combines infinity norms before it reduces them. Only 2.10 reduces all norms."""

CALLS_AMONG_ONE_RANK = "<2.10"
"""In these versions, DTensor, DDP and FSDP call some collectives in groups with one rank.
Later versions skip them and call other collectives."""

FREED_WHILE_RECOMPUTED = "<2.10"
"""In these versions, `fully_shard` frees a unit inside a recomputed layer, gathers it once more in backward, and prefetches other
units that may be free. Later versions keep the unit."""
