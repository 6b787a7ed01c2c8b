"""Each cause with the smallest scenario that identifies it, and a planted fault."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import (
    DDP,
    FSDP2,
    SGD,
    ActivationSharding,
    Adam,
    AdamW,
    Axis,
    ClipNorm,
    Data,
    ExponentialLR,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Muon,
    Norm,
    Parallelism,
    ParameterGroup,
    Pipeline,
    Scenario,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.training.setup import Setup
from unit.diagnosis import faults

Fault = Callable[[Setup], None]

LAYER = Layer(width=2)
CLIPPED = ClipNorm(max_norm=0.01)
MOMENTUM = SGD(lr=0.125, momentum=0.9)
PLAIN, SHARDED = DDP(), FSDP2()
UNEVEN_CHUNKS = Pipeline(num_chunks=2, presplit=True)


def over(
    sizes: dict[str, int], by: Parallelism = PLAIN, *layers: Layer, rows: tuple[int, ...] = (4,), **training: object
) -> Scenario:
    """One layer, or the given ones, on a mesh."""
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()))
    model = Model(features=2, layers=layers or (LAYER,))
    data = training.pop("data", Data(microbatches=rows))
    return Scenario(
        training=Training(model=model, data=data, **training),  # type: ignore[arg-type]
        layout=Layout(mesh=mesh, parallelisms=(by,)),
    )


def on_2(by: Parallelism = PLAIN, *layers: Layer, rows: tuple[int, ...] = (4,), **training: object) -> Scenario:
    """One layer, or the given ones, on two data-parallel ranks."""
    return over({"dp": 2}, by, *layers, rows=rows, **training)


def split(*layers: Layer, plan: tuple[LayerPlan, ...]) -> Scenario:
    """Layers split over two ranks."""
    return over({"tp": 2}, TensorParallel(plan=plan), *layers)


COLUMN, ROW, LEAVES_ROWS = (
    LayerPlan(split=Split.COLWISE),
    LayerPlan(split=Split.ROWWISE),
    LayerPlan(output=ActivationSharding.ROWS),
)
NORMED, TIED = Layer(width=2, norm=Norm.RMS), Layer(width=2, shares=0)


def one_more_call(setup: Setup) -> None:
    """Issue an all-reduce whose result is unused."""
    setup.before_update.append(lambda _optimizer, _step: dist.all_reduce(torch.zeros(1)))


def last_row_of_one_tensor(setup: Setup) -> None:
    """Replace one gradient row with values that no fault explains."""
    weight = setup.model.get_parameter("layers.0.linear.weight")

    def spoil() -> None:
        assert weight.grad is not None
        weight.grad[-1] = torch.cos(1e3 * weight.grad[-1])

    setup.before_update.append(lambda _optimizer, _step: spoil())


def first_microbatch_twice(setup: Setup) -> None:
    """Compute the first microbatch twice."""
    inner = setup.compute
    setup.compute = lambda setup, microbatches, index: inner(setup, [microbatches[0], *microbatches], index)


def one_rank_spoiled(setup: Setup) -> None:
    """Replace one rank's parameters with values that no fault explains."""

    def spoil(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        for parameter in setup.model.parameters() if dist.get_rank() == 1 else ():
            parameter.data.copy_(torch.cos(1e3 * parameter.data))

    setup.update = spoil


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A cause with a scenario that shows it."""

    cause: Cause
    """Expected cause."""
    scenario: Scenario
    """Scenario to plant the fault in."""
    fault: str | Fault
    """Name of a mutant, or a fault."""
    words: str
    """Expected part of the sentence."""
    exact: bool = True
    """Whether the diagnosis is proven."""

    @property
    def plant(self) -> Fault:
        """Plants the fault in each rank's setup."""
        return mutant(self.fault).plant if isinstance(self.fault, str) else self.fault


def _example(cause: Cause, scenario: Scenario, fault: str | Fault, words: str, *, exact: bool = True) -> Example:
    return Example(cause=cause, scenario=scenario, fault=fault, words=words, exact=exact)


_HYBRID = {"dp_replicate": 2, "dp_shard": 2}
_TWO = (2, 2)
EXAMPLES = (
    _example(Cause.NOT_REDUCED, on_2(), "reduction_missing", "left unreduced over the 2 dp ranks: each rank keeps the"),
    _example(
        Cause.REDUCED_OVER_PART,
        over(_HYBRID, SHARDED),
        "replicas_not_reduced",
        "reduced over the 2 dp_shard ranks, but not over the 2 dp_replicate ranks",
    ),
    _example(Cause.SUMMED, on_2(), "gradients_summed", "the sum over the 2 dp ranks, not the mean"),
    _example(Cause.AVERAGED_TWICE, on_2(), "averaged_twice", "averaged twice over the 2 dp ranks"),
    _example(Cause.GRADIENT_LOST, on_2(), "last_bucket_lost", "zero"),
    _example(Cause.SAME_ROWS, on_2(), "same_rows_everywhere", "the 2 dp ranks compute on the same rows: those of the first rank"),
    _example(Cause.ROWS_LOST, over({"dp": 3}, rows=(3,)), "rank_left_out", "the gradients of rank"),
    _example(Cause.ROWS_REPEATED, over({"pp": 1}, UNEVEN_CHUNKS, rows=(5,)), "pipeline_padding_counted", "rows count twice if"),
    _example(Cause.UNEQUAL_START, on_2(), "weights_not_broadcast", "starts with other values of"),
    _example(Cause.NOT_ZEROED, on_2(steps=2), "gradients_not_zeroed", "gradients are not zeroed between steps"),
    _example(
        Cause.MICROBATCHES_SUMMED, over({"dp": 1}, rows=(2, 2, 2)), "microbatches_summed", "the sum over the 3 microbatches, not"
    ),
    _example(Cause.MICROBATCH_LOST, on_2(rows=_TWO), "only_last_microbatch", "the gradient is from microbatch 1 (the last) only"),
    _example(
        Cause.MICROBATCH_REPEATED,
        on_2(rows=_TWO),
        first_microbatch_twice,
        "gradient and loss are accumulated with microbatch 0 (the first) added twice",
    ),
    _example(
        Cause.RESCALED_EACH_MICROBATCH,
        on_2(rows=_TWO),
        "rescaled_each_microbatch",
        "the accumulated gradient is divided by the number of microbatches after each microbatch",
    ),
    _example(
        Cause.STEPPED_EACH_MICROBATCH, on_2(rows=_TWO), "stepped_each_microbatch", "the optimizer steps after each microbatch"
    ),
    _example(Cause.MEAN_OF_MEANS, over({"dp": 1}, rows=(2, 1)), "mean_of_means", "although they have different numbers of rows"),
    _example(
        Cause.TRAILING_WINDOW,
        over({"dp": 1}, data=Data(microbatches=(2, 2, 2), last_window=1), steps=2),
        "trailing_window_divided_as_full",
        "of step 1, with 1 of 3 microbatches, is divided as if it had the rows of a full accumulation window",
    ),
    _example(Cause.LOCAL_NORM, on_2(SHARDED, clipping=CLIPPED), "local_norm", "each rank clips by its local norm"),
    _example(
        Cause.CLIPPED_BEFORE_REDUCTION,
        on_2(clipping=CLIPPED),
        "clipped_before_reduction",
        "each rank clips the gradients of its own rows before they are reduced",
    ),
    _example(
        Cause.REPLICAS_IN_NORM,
        on_2(clipping=CLIPPED),
        "replicas_in_norm",
        "counts gradients replicated over the 2 dp ranks once per rank",
    ),
    _example(
        Cause.PART_OF_NORM, on_2(clipping=CLIPPED), "vectors_not_in_norm", "the total norm leaves out `layers.0.linear.bias`"
    ),
    _example(
        Cause.ANOTHER_NORM,
        on_2(SHARDED, clipping=CLIPPED),
        "norms_added_up",
        "the local norms on the 2 dp ranks are summed",
    ),
    _example(
        Cause.NORM_MISREPORTED,
        on_2(clipping=CLIPPED),
        "norm_after_clipping_returned",
        "gradients are clipped correctly, but the norm returned is",
    ),
    _example(Cause.NOT_CLIPPED, on_2(clipping=CLIPPED), "not_clipped", "gradients are not clipped"),
    _example(Cause.NOT_UPDATED, on_2(SHARDED, Layer(width=3)), "padded_tail_not_updated", "the optimizer does not update row 2"),
    _example(Cause.STATE_LOST, on_2(optimizer=MOMENTUM, steps=2), "state_lost", "the optimizer state is lost before each step"),
    _example(
        Cause.STATE_OF_ANOTHER,
        on_2(SHARDED, optimizer=MOMENTUM, steps=2),
        "state_of_another_rank",
        "rank r has the optimizer state of rank r + 1",
    ),
    _example(
        Cause.LOCAL_STATISTICS,
        on_2(SHARDED, Layer(width=2, bias=False), optimizer=Muon(ns_steps=1)),
        "statistics_of_shards",
        "the optimizer treats each rank's shard as the full tensor",
    ),
    _example(
        Cause.PARTIAL_INPUT_GRADIENT,
        split(NORMED, plan=(COLUMN,)),
        "column_input_gradient_not_reduced",
        "the gradient of the input of `layers.0.linear` is not summed over the 2 tp ranks",
    ),
    _example(
        Cause.INPUT_GRADIENT_SUMMED_TWICE,
        split(LAYER, NORMED, plan=(LEAVES_ROWS, COLUMN)),
        "column_input_gradient_reduced_twice",
        "the gradient of the input of `layers.1.linear` is summed twice over the 2 tp ranks",
    ),
    _example(
        Cause.BIAS_ON_EVERY_RANK,
        split(LAYER, plan=(ROW,)),
        "row_bias_on_every_rank",
        "the bias of `layers.0.linear` is added on each of the 2 tp ranks, not once",
    ),
    _example(
        Cause.PARTIAL_OUTPUT,
        split(LAYER, plan=(ROW,)),
        "row_output_not_reduced",
        "the output of `layers.0.linear` is not summed over the 2 tp ranks",
    ),
    _example(
        Cause.OUTPUT_AVERAGED,
        split(LAYER, plan=(ROW,)),
        "row_output_averaged",
        "the output of `layers.0.linear` is averaged over the 2 tp ranks, not summed",
    ),
    _example(Cause.PERMUTED, on_2(SHARDED), "reduce_scatter_shifted", "rank r has the gradient shards of rank r + 1"),
    _example(
        Cause.DECAY_EVERYWHERE,
        on_2(optimizer=SGD(weight_decay=0.25), groups=(ParameterGroup(),)),
        "decay_on_groups_without",
        "weight_decay is 0.25, not 0",
    ),
    _example(
        Cause.DECAY_COUPLED,
        on_2(optimizer=AdamW(weight_decay=0.25)),
        "decay_coupled",
        "decoupled_weight_decay is False, not True",
    ),
    _example(Cause.DECAY_TWICE, on_2(optimizer=SGD(weight_decay=0.25)), "decay_twice", "weight_decay is 0.5, not 0.25"),
    _example(Cause.STEP_COUNT, on_2(optimizer=Adam(), steps=2), "step_not_counted", "counts every step as the first"),
    _example(
        Cause.HYPERPARAMETER,
        on_2(optimizer=SGD(momentum=0.9, dampening=0.5), steps=2),
        "dampening_forgotten",
        "the optimizer runs with wrong settings: dampening is 0, not 0.5",
    ),
    _example(Cause.SCHEDULE, on_2(schedule=ExponentialLR(), steps=2), "schedule_stuck", "the schedule never advances"),
    _example(Cause.REDUCED_IN_LOWER_PRECISION, on_2(), "reduced_in_bfloat16", "gradients are reduced in bfloat16"),
    _example(Cause.MASTERS_IN_LOWER_PRECISION, on_2(), "masters_in_bfloat16", "parameters are kept in bfloat16 between steps"),
    _example(Cause.NOT_UNSCALED, on_2(), "never_unscaled", "as if the loss had been scaled and gradients never unscaled"),
    _example(
        Cause.ANOTHER_MASK,
        split(Layer(width=2, dropout=0.5), plan=(COLUMN,)),
        "masks_drawn_on_each_rank",
        "without dropout your ranks match it",
        exact=False,
    ),
    _example(
        Cause.UNTIED,
        on_2(PLAIN, LAYER, TIED),
        "tied_weight_without_gradient",
        "the use of the shared `layers.0.linear.weight` in layer 1 adds nothing to its gradient",
    ),
    _example(Cause.STALE, on_2(steps=2), "parameters_of_last_step", "computed with the parameters of the previous step"),
    _example(
        Cause.READ_BEFORE_DONE,
        on_2(),
        "read_before_done",
        "NaN: the result of an asynchronous call may have been read",
        exact=False,
    ),
    _example(Cause.CALLS_DIFFER, on_2(), "rank_skips_reduction", "ranks issue different communication calls: rank 0"),
    _example(Cause.RANK_FAILED, on_2(), "rank_raises", "raises"),
    _example(Cause.COMMUNICATION, on_2(), one_more_call, "values match; communication does not", exact=False),
    _example(Cause.SCALED, on_2(), faults.gradients(lambda values: values.mul_(1.5)), "1.5 times as large as on one device"),
    _example(
        Cause.PART_OF_TENSOR,
        over({"dp": 1}),
        last_row_of_one_tensor,
        "the difference is limited to row 1 of `layers.0",
        exact=False,
    ),
    _example(Cause.RANKS_DISAGREE, on_2(), one_rank_spoiled, "ranks disagree on `layers.0.linear.", exact=False),
)
