"""Data in a trace: a rank's records of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from equivcheck.recording.exact import ExactHash
from equivcheck.recording.sketch import Sketch
from equivcheck.system.choice import PrintableEnum
from equivcheck.worlds.trace.trace import Piece


class Moment(PrintableEnum):
    """Point in a step at which a value was read, in training order. Gradients are those with which the optimizer steps."""

    START = "start"
    SAMPLES = "samples"
    OUTPUT = "output"
    LOSS = "loss"
    ACCUMULATED = "gradient before a microbatch"
    UNCLIPPED = "gradient before clipping"
    NORM = "norm"
    GRADIENT = "gradient"
    UPDATE = "parameter"
    STATE = "state"
    BUFFER = "buffer"


OUTPUT_DTYPES = "dtype of module outputs"
"""Key in `Header.environment` for output dtypes.

Autocast and mixed precision compute in coarser types than those of parameters and gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Facts about a recorded process."""

    rank: int
    """Rank, from 0."""
    num_ranks: int
    """Number of ranks."""
    argv: tuple[str, ...]
    """Command line."""
    environment: Mapping[str, str]
    """Settings that may change values, such as torch's version and ``OMP_NUM_THREADS``."""
    num_steps: int | None = None
    """Number of steps that `record` was asked for; None for all."""
    moved: int = 0
    """Choice of moved initial parameters, from 1; 0 if they were not moved."""
    notes: tuple[str, ...] = ()
    """Clauses about tensors' names and positions."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One rank's part in one tensor at one point in a step."""

    moment: Moment
    """Point in the step at which the value was read."""
    piece: Piece
    """Name and position in the full tensor."""
    dtype: str
    """Element type, such as ``float32``."""
    sketch: Sketch
    """The part's sketch."""
    exact: ExactHash | None = None
    """Exact hash of initial values and buffers; None for other tensors."""
    addends: tuple[int, ...] | None = None
    """Ranks whose parts add up to the tensor, as with DTensor's `Partial`; None if this part is complete.

    Empty if the parts are reduced in another way, such as to their maximum."""
    microbatch: int = 0
    """Number of backward passes before it in this step, for accumulated gradients."""
    model_dtype: str = ""
    """The parameter's element type if this tensor has another one, such as a float32 copy in the optimizer; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Output:
    """A module's output for one microbatch, on one rank. Signs depend on the hash of a sample, and not on its row."""

    module: str
    """Name of the module in the model without wrappers; empty for the model."""
    call: int
    """Number of earlier calls of this module in the microbatch."""
    microbatch: int
    """Position in `RecordedStep.samples`."""
    shape: tuple[int, ...]
    """Shape for one sample."""
    dtype: str
    """Element type."""
    sketch: Sketch
    """Sketch over all samples in the microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One call of a clipping function."""

    norm: float
    """Norm that the function returned."""
    max_norm: float
    """Norm to which gradients are clipped."""
    norm_type: float = 2.0
    """Norm type."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedStep:
    """One step, as a rank recorded it."""

    step: int
    """Number of earlier updates."""
    losses: tuple[float, ...]
    """Scalars on which `backward` was called, in order."""
    entries: tuple[Entry, ...]
    """Tensors."""
    samples: tuple[tuple[int, ...], ...] = ()
    """Each microbatch's samples, as 64-bit hashes over all inputs of the model, if a backward pass ran through the model."""
    num_backwards: int = 0
    """Calls of `backward`, with or without samples."""
    clips: tuple[Clip, ...] = ()
    """Calls of clipping functions, in order."""
    settings: tuple[Mapping[str, str], ...] = ()
    """Each parameter group's settings when its optimizer stepped, with the optimizer's class as the setting ``optimizer``."""
    outputs: tuple[Output, ...] = ()
    """Module outputs, if `record` was asked for them."""
    num_skipped: int = 0
    """Updates that a `GradScaler` skipped, because gradients were infinite or NaN. These gradients are not recorded."""
    num_backwards_after: int = 0
    """Calls of `backward` after the last step, not followed by an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One trace file."""

    header: Header
    """Facts about the process."""
    steps: tuple[RecordedStep, ...]
    """Steps in order."""
    is_cut_off: bool
    """Whether the last line is incomplete, because the process was killed while it wrote."""
