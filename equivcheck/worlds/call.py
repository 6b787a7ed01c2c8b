"""One communication call as a world saw it."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.worlds.trace.stage import Stage

BEFORE_STEPS = -1
"""The step of calls that are issued before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective (or a send or receive) issued by one rank."""

    op: str
    """``all_reduce``, ``all_gather``, ``broadcast``, ``send`` ...; for reductions followed by ``.sum`` etc."""
    ranks: tuple[int, ...]
    """Global ranks of the group it was issued on."""
    index: int
    """How many calls the rank had issued on this group before this one."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that the rank puts in (for a receive or a pure output: of the tensors it fills)."""
    dtype: str
    """Their element type, as ``float64``; empty for a barrier."""
    num_bytes: int
    """Bytes of those tensors."""
    peer: int | None = None
    """Global rank of the root or the other side; None where the call has none."""
    stage: Stage = Stage.SETUP
    """What the rank was doing, as far as the program said."""
    step: int = BEFORE_STEPS
    """In which step, from 0; `BEFORE_STEPS` in the setup."""

    def describe(self) -> str:
        """One line: ``all_reduce.sum float64[3, 4] on ranks (0, 1), call 7``."""
        tensors = " ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes)
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return " ".join(part for part in (self.op + peer, tensors, f"on ranks {self.ranks}, call {self.index}") if part)
