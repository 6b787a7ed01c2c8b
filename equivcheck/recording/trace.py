"""Data classes for a trace: each rank's records of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from equivcheck.recording.exact import ExactHash
from equivcheck.recording.sketch import Sketch
from equivcheck.system.choice import PrintableEnum
from equivcheck.worlds.trace.trace import Piece


class Moment(PrintableEnum):
    """Point in a step at which a value was read, in training order. `GRADIENT` is the gradient that the optimizer uses."""

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
    """How many ranks the job has."""
    argv: tuple[str, ...]
    """Command line."""
    environment: Mapping[str, str]
    """Settings that may change values, such as torch's version and ``OMP_NUM_THREADS``."""
    num_steps: int | None = None
    """How many steps `record` was asked for; None if it records all steps."""
    moved: int = 0
    """Random perturbation of the initial parameters in the last bit, numbered from 1; 0 without perturbation."""
    notes: tuple[str, ...] = ()
    """Clauses about tensors' names and positions, which `compare` shows as notes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One rank's elements in one tensor, recorded at one point in training."""

    moment: Moment
    """Point in the step at which the value was read."""
    piece: Piece
    """The tensor's name, and the elements' position in the full tensor."""
    dtype: str
    """Element type, such as ``float32``."""
    sketch: Sketch
    """Sketch of the rank's elements."""
    exact: ExactHash | None = None
    """Exact hash of the rank's elements, for initial values and buffers; None for other tensors."""
    addends: tuple[int, ...] | None = None
    """Ranks whose elements must be added to give the tensor, as with DTensor's `Partial`; None if these elements are complete.

    Empty if they must be combined in another way, such as by a maximum.
    """
    microbatch: int = 0
    """For accumulated gradients: how many backward passes the step had before this record."""
    model_dtype: str = ""
    """The model parameter's element type, if this tensor is a copy in another dtype, such as float32; otherwise empty."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Output:
    """The output of a module for one microbatch, on one rank.

    In the sketch, a sample's elements have signs that depend on the sample's hash. The sketch therefore does not depend on the
    samples' order or ranks.
    """

    module: str
    """Name of the module in the model without wrappers; empty for the model."""
    call: int
    """How many times this module was called before in the same microbatch."""
    microbatch: int
    """Index of the microbatch in `RecordedStep.samples`."""
    shape: tuple[int, ...]
    """Shape of the output for one sample."""
    dtype: str
    """Element type."""
    sketch: Sketch
    """Sketch of the output for all samples in the microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One call of a clipping function."""

    norm: float
    """Gradient norm that the function returned."""
    max_norm: float
    """Largest norm that the function allows."""
    norm_type: float = 2.0
    """The p in the p-norm, such as 2.0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedStep:
    """The record of one training step on one rank."""

    step: int
    """How many updates came before this step."""
    losses: tuple[float, ...]
    """Scalars on which `backward` was called, in order."""
    entries: tuple[Entry, ...]
    """Sketches of the rank's parameters, gradients, optimizer state and buffers."""
    samples: tuple[tuple[int, ...], ...] = ()
    """For each microbatch, a 64-bit hash for each sample, over all inputs of the model. Microbatches count if a backward pass ran
    through the model.
    """
    num_backwards: int = 0
    """How often `backward` was called, with or without samples."""
    clips: tuple[Clip, ...] = ()
    """Calls of clipping functions, in order."""
    settings: tuple[Mapping[str, str], ...] = ()
    """Settings of each parameter group when its optimizer stepped. The setting ``optimizer`` is the optimizer's class."""
    outputs: tuple[Output, ...] = ()
    """Module outputs, if `record` was asked for them."""
    num_skipped: int = 0
    """How many updates a `GradScaler` skipped, because gradients were infinite or NaN. These gradients are not recorded."""
    num_backwards_after: int = 0
    """How often `backward` was called after the run's last update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's record: the contents of its trace file."""

    header: Header
    """Facts about the recorded process."""
    steps: tuple[RecordedStep, ...]
    """Records of the steps, in order."""
    is_cut_off: bool
    """Whether the file's last line is incomplete, because the process was killed while it wrote."""
