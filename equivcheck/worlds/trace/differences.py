"""Where and in what way what ranks left differs from the reference."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.system.choice import Choice


class Phase(Choice):
    """The parts of a step, in the order in which a first divergence is looked for."""

    LOSS = "loss"
    VALUE = "value"
    GRADIENT = "gradient"
    CLIPPING = "clipping"
    UPDATE = "update"
    STATE = "state"
    BUFFER = "buffer"
    COMMUNICATION = "communication"


class Difference(Choice):
    """In what way a tensor differs."""

    VALUE = "value"
    RANKS_DISAGREE = "ranks_disagree"
    MISSING = "missing"
    EXTRA = "extra"
    SHAPE = "shape"
    DTYPE = "dtype"
    NAN = "nan"
    FULL_TENSOR = "full_tensor"
    CALLS = "calls"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One tensor that differs from the reference."""

    step: int
    """Step, from 0; the last one for state and buffers."""
    phase: Phase
    """Part of the step."""
    tensor: str
    """Canonical name; ``loss``, ``norm``, ``parameter/state`` for scalars and state; which calls, where these differ."""
    difference: Difference
    """In what way."""
    rank: int
    """First rank on which it shows, of ranks that disagree one that is off the reference; -1 where none is to blame (a mean)."""
    ranks: tuple[int, ...] = ()
    """All ranks that hold the element, where they have the same wrong value; empty where they disagree, or have no value."""
    index: tuple[int, ...] = ()
    """Index of the worst element in the full tensor; empty where there is none."""
    expected: str = ""
    """The reference's value there (or shape, dtype, presence, calls expected), printed so that it reads back exactly."""
    actual: str = ""
    """The candidate's."""
    elsewhere: str = ""
    """Where ranks disagree, what another has, as ``rank 1 has 0.5``; else empty."""
    error: float = 0.0
    """Norm of the error over the tolerance: above 1 is a divergence; infinite for anything but values."""
