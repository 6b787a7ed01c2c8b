"""Pipeline parallelism: consecutive layers form stages, and each rank runs one or several stages."""

from __future__ import annotations

from typing import ClassVar

from equivcheck.scenario.mesh import PP
from equivcheck.scenario.model import MAX_LAYERS
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, option, require_between
from equivcheck.scenario.parallelisms.base import Parallelism
from equivcheck.system.choice import PrintableEnum

MAX_CHUNKS = 16


class PipelineSchedule(PrintableEnum):
    """Schedules in `torch.distributed.pipelining`."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    LOOPED_BFS = "looped_bfs"
    INTERLEAVED = "interleaved_1f1b"
    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"
    ZBV = "zbv_zero_bubble"
    DUAL_PIPE_V = "dual_pipe_v"

    @property
    def is_single(self) -> bool:
        """Whether each rank has exactly one stage."""
        return self in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B)

    @property
    def is_v(self) -> bool:
        """Whether stages go from rank 0 to the last rank and back again, so that rank 0 has the first and the last stage."""
        return self in (PipelineSchedule.ZBV, PipelineSchedule.DUAL_PIPE_V)


@frozen_dataclass
class Pipeline(Parallelism):
    """Options for `torch.distributed.pipelining` with explicit `PipelineStage` objects.

    The schedule runs each microbatch of the training by one `step()` call, which splits it into chunks (torch: "microbatches").
    Gradients accumulate over the calls of a training step. With `no_sync`, stages of `FSDP2` or `replicate_with_fsdp` reduce
    gradients in the last call only (`finalize_gradients`, torch 2.15), if all microbatches have the same size and therefore share
    a schedule. Otherwise each call reduces gradients.
    """

    tag: ClassVar[str] = "pipeline"
    axes: ClassVar[tuple[tuple[str, ...], ...]] = ((PP,),)
    schedule: PipelineSchedule = PipelineSchedule.GPIPE
    """Pipeline schedule."""
    num_chunks: int = 1
    """Number of chunks that each microbatch's rows are split into (torch's ``n_microbatches``), 1 to 16.

    `ONE_F_ONE_B` needs at least one chunk for each rank, and `DUAL_PIPE_V` two."""
    stages_per_rank: int = 1
    """Stages on each rank: 1 for single-stage schedules, 2 for V schedules, else 1 to 8."""
    boundaries: tuple[int, ...] = ()
    """Index of the first layer in each stage except stage 0, strictly increasing. Empty for stages of about equal size."""
    scale_grads: bool = option(default=False, calls=False)
    """Whether torch divides gradients by the number of chunks; otherwise the loss is divided before backward.

    torch divides after each `step()` call, and divides gradients from earlier calls again. With several chunks and microbatches,
    the option is therefore supported only if `no_sync` defers the reduction to the last call (torch 2.15)."""
    static_shapes: bool = False
    """Whether activation shapes are passed to the stages; otherwise torch infers them in an extra pass."""
    presplit: bool = option(default=False, calls=False)
    """Whether ranks split each microbatch themselves and pass its chunks to the schedule; otherwise `step()` splits it.

    Chunks of unequal size are padded: the smaller ones repeat their last row, and the loss leaves that row out."""
    sends_dtensors: bool = option(default=False, calls=False)
    """Whether stages pass DTensors to each other; otherwise they pass local tensors. Only with `TensorParallel`."""

    def __post_init__(self) -> None:
        require_between(self, "num_chunks", 1, MAX_CHUNKS)
        require_between(self, "stages_per_rank", 1, MAX_LAYERS)
        if self.schedule.is_single and self.stages_per_rank != 1:
            raise invalid_field(self, "stages_per_rank", f"1 if schedule is {self.schedule!r}")
        if self.schedule.is_v and self.stages_per_rank != 2:
            raise invalid_field(self, "stages_per_rank", f"2 if schedule is {self.schedule!r}")
        if any(after <= before for before, after in zip((0, *self.boundaries), self.boundaries, strict=False)):
            raise invalid_field(self, "boundaries", "strictly increasing numbers of at least 1")

    def require_ranks(self, count: int) -> None:
        """Raise `InvalidScenario` if stages, boundaries or schedule do not allow this number of ranks."""
        num_stages = count * self.stages_per_rank
        if num_stages > MAX_LAYERS:
            raise invalid_field(
                self, "stages_per_rank", f"at most {MAX_LAYERS // count} on {count} ranks", "each stage needs a layer"
            )
        if self.boundaries and len(self.boundaries) != num_stages - 1:
            raise invalid_field(
                self, "boundaries", f"() or {num_stages - 1} entries for {count} ranks x {self.stages_per_rank} stages"
            )
        if not can_run_chunks(self.schedule, self.num_chunks, count):
            raise invalid_field(
                self, "num_chunks", f"a number that {self.schedule!r} can run on {count} ranks, such as {2 * count}"
            )


def can_run_chunks(schedule: PipelineSchedule, num_chunks: int, ranks: int) -> bool:
    """Whether torch can run a schedule with these numbers of chunks and ranks."""
    if schedule is PipelineSchedule.ONE_F_ONE_B:
        return num_chunks >= ranks
    if schedule is PipelineSchedule.DUAL_PIPE_V:
        return num_chunks >= 2 * ranks
    if schedule in (PipelineSchedule.INTERLEAVED, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE):
        return num_chunks % max(1, num_chunks // ranks) == 0
    return True
