"""Placements as torch prints them: ``R``, ``S(0)``, ``P(sum)``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from equivcheck.errors import InvalidScenario

REPLICATE = "R"
REDUCTIONS = ("sum", "avg", "max", "min")
"""Reductions that turn a `Partial` into the full tensor."""
ALLOWED = "R, S(dim) with dim from 0, P(sum), P(avg), P(max) or P(min)"
_SHARD = re.compile(r"S\((0|[1-9][0-9]?)\)")
_PARTIAL = re.compile(rf"P\(({'|'.join(REDUCTIONS)})\)")


def shard(dim: int) -> str:
    """Return the text for the placement sharded along `dim`, such as ``S(0)``."""
    return f"S({dim})"


def partial(reduction: str = "sum") -> str:
    """Return the text for the partial placement with this reduction, such as ``P(sum)``."""
    return f"P({reduction})"


def sharded_dim(placement: str) -> int | None:
    """Return the sharded dim; None if the placement is not a shard."""
    found = _SHARD.fullmatch(placement)
    return int(found[1]) if found else None


def reduction_of(placement: str) -> str | None:
    """Return the reduction of a partial placement; None for other placements."""
    found = _PARTIAL.fullmatch(placement)
    return found[1] if found else None


def require_placements(owner: object, placements: Sequence[str], num_dims: int | None = None) -> None:
    """Raise `InvalidScenario` for an unknown placement, or for a sharded dim beyond `num_dims` dims.

    The message names `owner`, the object with these placements.
    """
    name = type(owner).__name__
    for placement in placements:
        dim = sharded_dim(placement)
        if dim is None and placement != REPLICATE and reduction_of(placement) is None:
            raise InvalidScenario(f"{name}.placements {placement!r:.60} is not valid: unknown placement. Expected {ALLOWED}")
        if dim is not None and num_dims is not None and dim >= num_dims:
            why = f"the tensor has {num_dims} dims"
            allowed = f"a dim below {num_dims}" if num_dims else "a placement without a dim"
            raise InvalidScenario(f"{name}.placements {placement} is not valid: {why}. Expected {allowed}")
