"""In what the calls of torch's versions differ: each difference once, with the range of versions that has it."""

from __future__ import annotations

WEIGHT_GATHERED_FOR_INPUT_GRADIENT = "<2.14"
"""Backward gathers the weight of a linear with fewer features than ranks again; later versions keep what forward has gathered, or
gather it again where forward is recomputed."""

SUM_OF_NORMS_FIRST = "<2.10"
"""`clip_grad_norm_` combines the norms of DTensors to one, then reduces it over ranks; later versions reduce all of them."""

LARGEST_NORM_FIRST = "!=2.10.*"
"""The same of infinity norms; 2.10 alone reduces all of them."""

CALLS_AMONG_ONE_RANK = "<2.10"
"""DTensor, DDP and FSDP call collectives in groups of one rank where later versions do not, and the other way round."""

FREED_WHILE_RECOMPUTED = "<2.10"
"""`fully_shard` frees a unit inside a layer that is computed again in backward, gathers it once more, and asks for others ahead
of time that may be free; later versions keep it."""
