"""Recognizes errors with which DTensor or spmd_types clearly refuses an operation.

The program then continues with the values from one device.
"""

from __future__ import annotations

import re

from equivcheck.worlds.failure import causes

CLEAR = (
    r"does not have a sharding strategy registered",
    r"found no DeviceMesh from dtensor args for",  # no strategy for an operation on a list
    r"Cannot find device mesh from args for op",  # the same on torch 2.10
    r"only support replicate to PartialSUM",  # torch 2.9
    r"no valid sharding strategy for the input placements",
    r"got mixed torch\.Tensor and DTensor",
    r"in-place operations that require placement changes are not supported",
    r"[Cc]an ?not redistribute (to|from) ",
    r"[Cc]annot (un)?flatten (unevenly sharded tensor|tensor with _StridedShard)",
    r"Cannot shard unevenly distributed tensor",
    r"Attempted to (flatten|split|unbind along) (multiple|the sharded|unevenly sharded) dimension",
    r"This operation would remove or \w+ ",
    r"intermediate results of nll_loss cannot be evenly sharded",
    r"for tensor parallel convolution\.",
    r"not (yet )?supported",
    r"implementation does not support",
    r"not (yet )?implemented",
    r"unsupported",
    # DTensor checks dtypes also of empty tensors, for which plain torch computes nothing and does not check:
    r"expected scalar type torch\.\w+ but found|expected a floating-point or complex dtype, but got",
    r"Input type \(torch\.(bool|u?int\d+)\) and weight type \(.+\) should be the same",
    r"DataDependentOutputException|DynamicOutputShapeException",  # DTensor uses fake tensors, which have no values
    r"all_reduce input must be contiguous",  # spmd_types, also for a gradient, which the caller cannot make contiguous
)
"""Regular expressions for a refusal's text, or for the error that caused it."""
_PATTERN = re.compile("|".join(CLEAR), re.IGNORECASE)
LONGEST = 300
"""Maximum characters kept from a refusal."""


def refusal(error: BaseException) -> str | None:
    """Return the error as one line if it clearly names an unsupported use; None for any other error."""
    text = f"{type(error).__name__}: {error}{causes(error)}"
    if "CallRefused" in text:  # a simulated collective refused the call, and DTensor should not have called it
        return None
    if not (isinstance(error, NotImplementedError) or _PATTERN.search(text)):
        return None
    return " ".join(text.split())[:LONGEST]
