"""One recorded communication call."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.worlds.trace.stage import Stage

BEFORE_STEPS = -1
"""Step number for calls before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective, send or receive by one rank."""

    op: str
    """``all_reduce``, ``all_gather``, ``broadcast``, ``send`` and so on; a reduction adds its operation, as in
    ``all_reduce.sum``."""
    ranks: tuple[int, ...]
    """Global ranks in the group."""
    index: int
    """Index among the rank's calls on the group, from 0."""
    shapes: tuple[tuple[int, ...], ...]
    """Input shapes; for a receive or a call without inputs, output shapes."""
    dtype: str
    """Element type such as ``float64``; empty for a barrier."""
    num_bytes: int
    """Bytes in all tensors of `shapes` together."""
    peer: int | None = None
    """Global rank of the root, or of the other side in a send or receive. None for other calls."""
    stage: Stage = Stage.SETUP
    """Training stage that the rank had announced with `mark` before the call; ``SETUP`` if it announced none."""
    step: int = BEFORE_STEPS
    """Step from 0; `BEFORE_STEPS` during setup."""

    def describe(self) -> str:
        """Describe the call in one line, such as ``all_reduce.sum float64[3, 4] on ranks (0, 1), call 7``.

        The last number is the call's index among the rank's calls on this group.
        """
        tensors = " ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes)
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return " ".join(part for part in (self.op + peer, tensors, f"on ranks {self.ranks}, call {self.index}") if part)
