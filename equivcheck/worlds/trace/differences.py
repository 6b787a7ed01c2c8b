"""Differences between a rank's recorded values and the single-device run."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.system.choice import PrintableEnum


class Phase(PrintableEnum):
    """Part of a step, such as loss or gradients, whose values are compared.

    Members are in the order of the search for the first divergence.
    """

    LOSS = "loss"
    VALUE = "value"
    GRADIENT = "gradient"
    CLIPPING = "clipping"
    UPDATE = "update"
    REPORTED = "reported"
    STATE = "state"
    BUFFER = "buffer"
    COMMUNICATION = "communication"


class Difference(PrintableEnum):
    """Kind of difference between a tensor and its value in the single-device run."""

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
    """One tensor that differs from the single-device run."""

    step: int
    """Step, from 0; the last step for state and buffers."""
    phase: Phase
    """Part of the step when the tensor was recorded."""
    tensor: str
    """Canonical name; ``loss`` and ``norm`` for scalars, ``parameter/state`` for optimizer state, a description for calls."""
    difference: Difference
    """Kind of difference."""
    rank: int
    """First rank whose value differs. If ranks disagree with each other, a rank that differs from the reference; -1 if no single
    rank is wrong, for example in a mean over ranks.
    """
    ranks: tuple[int, ...] = ()
    """All ranks with this wrong value, or without a value; empty if ranks disagree."""
    index: tuple[int, ...] = ()
    """Index of the worst element in the full tensor; empty if single elements were not compared."""
    expected: str = ""
    """Value in the reference at that index (or shape, dtype, presence, expected calls), printed without rounding."""
    actual: str = ""
    """Value on the rank, printed like `expected`."""
    elsewhere: str = ""
    """Value on another rank if ranks disagree, such as ``rank 1 has 0.5``; else empty."""
    error: float = 0.0
    """Error norm divided by the tolerance, above 1 for a divergence; infinite for differences other than values."""
