"""Text for one divergence."""

from __future__ import annotations

from equivcheck.worlds.trace.differences import Difference, Divergence


def place(divergence: Divergence) -> str:
    """Return step, phase and tensor of a divergence: ``step 0 gradient layers.0.linear.weight``."""
    return f"step {divergence.step} {divergence.phase.value} {divergence.tensor}"


def sentence(divergence: Divergence) -> str:
    """Describe a divergence in one sentence, with its place, the ranks, both values and the error."""
    where = f"{place(divergence)}{list(divergence.index) if divergence.index else ''}"
    if divergence.difference is Difference.FULL_TENSOR:
        values = f"full_tensor() returns {divergence.actual}, but the shards hold {divergence.expected}"
        return f"{where} on rank {divergence.rank}: {values}"
    how = f"{divergence.difference.value}, {divergence.error:.3g} x tolerance"
    if divergence.elsewhere:
        how = f"{divergence.difference.value}, {divergence.elsewhere}"
    return f"{where} {ranks_with_value(divergence)} is {divergence.actual}, expected {divergence.expected} ({how})"


def ranks_with_value(divergence: Divergence) -> str:
    """Say which ranks have the wrong value: ``on rank 1``, ``on ranks 0, 1``, or ``averaged over ranks``."""
    if divergence.rank < 0:
        return "averaged over ranks"
    if len(divergence.ranks) > 1:
        return f"on ranks {', '.join(map(str, divergence.ranks))}"
    return f"on rank {divergence.rank}"
