"""Known-issue predicates for pipelines."""

from __future__ import annotations

from collections.abc import Iterator

from equivcheck.layouts.base.known_predicates import need, show
from equivcheck.layouts.base.plan.rules import inputs_of
from equivcheck.layouts.parallelisms.pipeline import stages
from equivcheck.layouts.parallelisms.pipeline.stages import (
    ALWAYS_SPLIT,
    has_ddp_stages,
    has_fsdp_stages,
    has_lost_gradients,
    has_replicate_ddp_stages,
    layers_of_stages,
    stage_of_layers,
    stages_behind_frozen_layers,
    stages_of_rank,
    stages_without_training,
    trained_layers,
    uses_of_weights,
)
from equivcheck.layouts.parallelisms.pipeline.views import ends_of_middle_stages_in_view
from equivcheck.scenario import (
    DDP,
    ActivationSharding,
    LayerPlan,
    Pipeline,
    PipelineSchedule,
    Scenario,
    Split,
    TensorParallel,
    ZeroGrad,
)
from equivcheck.scenario.mesh import PP, TP
from equivcheck.training.layers.parameters import SCALE, layer_of
from equivcheck.worlds.trace.differences import Difference, Divergence


def _pipeline(scenario: Scenario) -> Pipeline | None:
    return next(iter(scenario.layout.of(Pipeline)), None)


def _spans(scenario: Scenario, pipeline: Pipeline) -> tuple[range, ...]:
    return layers_of_stages(pipeline, scenario.layout.mesh.size(PP), len(scenario.training.model.layers))


@need
def always_splits_backward(scenario: Scenario) -> bool:
    """Whether the schedule always computes input and weight gradients in separate passes (zero-bubble schedules)."""
    pipeline = _pipeline(scenario)
    return pipeline is not None and pipeline.schedule in ALWAYS_SPLIT


@need
def sometimes_splits_backward(scenario: Scenario) -> bool:
    """Whether DualPipeV runs on several ranks. For some chunks, it computes input and weight gradients in separate passes."""
    return scenario.layout.has(Pipeline) and stages.sometimes_splits_backward(scenario.layout)


@need
def splits_backward(scenario: Scenario) -> bool:
    """Whether the schedule computes input and weight gradients in separate passes for some chunk."""
    return scenario.layout.has(Pipeline) and stages.splits_backward(scenario.layout)


@need
def stages_are_fsdp_modules(scenario: Scenario) -> bool:
    """Whether pipeline stages are FSDP modules."""
    return has_fsdp_stages(scenario.layout)


@need
def ddp_stages_rebuild_buckets(scenario: Scenario) -> bool:
    """Whether pipeline stages are `DistributedDataParallel` modules that rebuild their buckets after a backward."""
    return has_ddp_stages(scenario.layout) and any(
        each.static_graph or not each.find_unused_parameters for each in scenario.layout.of(DDP)
    )


@need
def stages_have_hooks_of_replicate(scenario: Scenario) -> bool:
    """Whether `replicate` reduces the stages' gradients by DDP's hooks. The schedule does not recognise such stages."""
    return has_replicate_ddp_stages(scenario.layout)


@need
def stages_have_ddp_hooks(scenario: Scenario) -> bool:
    """Whether hooks of `DistributedDataParallel`, also inside `replicate`, reduce the gradients of pipeline stages."""
    return has_ddp_stages(scenario.layout) or has_replicate_ddp_stages(scenario.layout)


@need
def infers_stage_shapes(scenario: Scenario) -> bool:
    """Whether the schedule infers the shapes that stages send, because the layout does not declare them (`static_shapes`)."""
    return any(not pipeline.static_shapes for pipeline in scenario.layout.of(Pipeline))


@need
def several_chunks(scenario: Scenario) -> bool:
    """Whether the schedule splits each microbatch into several chunks."""
    return scenario.layout.num_chunks > 1


@need
def stages_are_resharded(scenario: Scenario) -> bool:
    """Whether stages are resharded after forward, and the schedule computes weight gradients in a separate pass."""
    return has_lost_gradients(scenario.layout)


@need
def forward_between_backward_passes(scenario: Scenario) -> bool:
    """Whether a stage starts backward of two chunks in a row, and runs a forward before the second chunk's weight gradients.

    `ScheduleInterleavedZeroBubble` does this on several ranks, with at least two chunks for each rank, and with an odd number of
    stages per rank, at least three.
    """
    pipeline, ranks = _pipeline(scenario), scenario.layout.mesh.size(PP)
    if pipeline is None or pipeline.schedule is not PipelineSchedule.INTERLEAVED_ZERO_BUBBLE:
        return False
    has_odd_stages = pipeline.stages_per_rank > 1 and pipeline.stages_per_rank % 2 == 1
    return has_odd_stages and ranks > 1 and pipeline.num_chunks >= 2 * ranks


@need
def several_schedules_in_a_step(scenario: Scenario) -> bool:
    """Whether microbatches have different sizes. Each size needs its own schedule."""
    return len(set(scenario.training.data.microbatches)) > 1


@show
def in_the_first_step(_scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the values diverge in the first training step, which builds a schedule for each size."""
    return divergence.step == 0


@need
def stage_behind_frozen_layers(scenario: Scenario) -> bool:
    """Whether some stage has only frozen layers before it, so the input of this stage needs no gradient."""
    return bool(_behind_frozen_layers(scenario))


def _behind_frozen_layers(scenario: Scenario) -> set[int]:
    """Return the stages behind frozen layers only, without the first stage."""
    return stages_behind_frozen_layers(scenario.training.model, scenario.layout) if scenario.layout.has(Pipeline) else set()


@show
def in_a_stage_behind_frozen_layers(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the divergent tensor belongs to a stage with only frozen layers before it."""
    return _stage_of(scenario, divergence.tensor) in _behind_frozen_layers(scenario)


@show
def missing_or_from_fewer_stages(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether the gradient is missing, or has a wrong value because other stages still add their gradients of a shared weight."""
    return divergence.difference is Difference.MISSING or len(_stages_with(scenario, divergence.tensor)) > 1


@show
def behind_the_first_stage(scenario: Scenario, divergence: Divergence) -> bool:
    """Whether a stage other than the first uses the divergent tensor."""
    return any(_stages_with(scenario, divergence.tensor))


def _stages_with(scenario: Scenario, tensor: str) -> set[int]:
    """Stages that use a parameter. Several stages can use a shared weight. Empty for an embedding without a tied head."""
    pipeline = _pipeline(scenario)
    assert pipeline is not None, "the scenario has stages"
    uses = uses_of_weights(scenario.training.model, pipeline, scenario.layout.mesh.size(PP))
    shared = {stage for owner, *others in uses if tensor == f"{owner[0]}.weight" for _, stage in (owner, *others)}
    own = _stage_of(scenario, tensor)
    return shared if own is None else {own, *shared}


def _stage_of(scenario: Scenario, tensor: str) -> int | None:
    """Stage of a parameter. None for the embedding."""
    stages = stage_of_layers(scenario.layout, len(scenario.training.model.layers))
    is_last = tensor == SCALE.full_name or tensor.startswith("head.")
    layer = len(stages) - 1 if is_last else layer_of(tensor)
    return None if layer is None else stages[layer]


@need
def stage_ends_in_view(scenario: Scenario) -> bool:
    """Whether the output of some stage between the first and the last is a view."""
    return scenario.layout.has(Pipeline) and bool(ends_of_middle_stages_in_view(scenario.training.model, scenario.layout))


@need
def stages_send_padded_features(scenario: Scenario) -> bool:
    """Whether a stage sends features, or their gradient, that `parallelize_module` gathers or exchanges, from unequal shards."""
    plans = scenario.layout.of(TensorParallel) if scenario.layout.has(Pipeline) else ()
    ranks = scenario.layout.mesh.size(TP)
    return any(features % ranks for plan in plans for features in _features_sent(scenario, plan))


def _features_sent(scenario: Scenario, plan: TensorParallel) -> Iterator[int]:
    """Yield the features of each tensor that stages send if its memory may be padded.

    It is the output of a column-parallel linear, or the gradient of a row-parallel linear's input that was sharded by rows.
    """
    model, pipeline = scenario.training.model, _pipeline(scenario)
    entries = dict(enumerate(plan.plan))
    ends = [] if pipeline is None else [span[-1] for span in _spans(scenario, pipeline)]
    if model.head is not None and plan.head is Split.COLWISE and not plan.loss_parallel:
        yield model.out_features
    for end in ends if model.head is None else ends[:-1]:
        entry, following = entries.get(end, LayerPlan()), entries.get(end + 1, LayerPlan())
        # A shape operation keeps the strides of the padding. Features exchanged for rows also keep them after an activation.
        ends_in_linear = model.layers[end].with_fields(shape_op=None).ends_in_linear
        is_exchanged = entry.output is ActivationSharding.ROWS
        is_padded = entry.split is Split.COLWISE and (ends_in_linear or is_exchanged)
        if is_padded or (is_exchanged and following.split is Split.ROWWISE):
            yield model.in_features(end + 1)


@need
def stages_send_slices_of_one_row(scenario: Scenario) -> bool:
    """Whether a stage with `parallelize_module` sends its rank's positions in a single row, as a slice from all positions."""
    training, layout = scenario.training, scenario.layout
    if training.model.length is None or not layout.has(Pipeline) or 1 not in layout.rows_of_forwards(training.data.microbatches):
        return False
    plans = layout.of(TensorParallel) if layout.mesh.size(TP) > 1 else ()
    ends = [span[-1] for pipeline in layout.of(Pipeline) for span in _spans(scenario, pipeline)[:-1]]
    return any(_slices_positions(scenario, plan, end) for plan in plans for end in ends)


def _slices_positions(scenario: Scenario, plan: TensorParallel, index: int) -> bool:
    """Whether a layer ends in a linear that computes all positions, and each rank keeps only some."""
    model, entry = scenario.training.model, plan.plan[index]
    computes_all = entry.split is Split.COLWISE or (
        entry.split is Split.REPLICATED and inputs_of(model, plan)[index] is not ActivationSharding.ROWS
    )
    ends_in_linear = model.layers[index].with_fields(shape_op=None).ends_in_linear
    return ends_in_linear and computes_all and entry.output is ActivationSharding.ROWS


@need
def weight_shared_around_others(scenario: Scenario) -> bool:
    """Whether a stage other than the first uses a trained weight twice, and uses a trained parameter between these two uses."""
    return any(_is_trained_between(scenario, *uses) for uses in _successive_uses(scenario))


@need
def weight_shared_in_a_row(scenario: Scenario) -> bool:
    """Whether a stage other than the first uses a trained weight twice, and uses no trained parameter between these two uses."""
    return not all(_is_trained_between(scenario, *uses) for uses in _successive_uses(scenario))


def _successive_uses(scenario: Scenario) -> Iterator[tuple[int, int]]:
    """Yield two layers for each two successive uses of a trained weight in the same stage behind the first."""
    pipeline, layers = _pipeline(scenario), scenario.training.model.layers
    for span in () if pipeline is None else _spans(scenario, pipeline)[1:]:
        last_uses: dict[int, int] = {}
        for index in span:
            shared = layers[index].shares
            owner = index if shared is None else shared
            if owner in last_uses and not layers[owner].frozen:
                yield last_uses[owner], index
            last_uses[owner] = index


def _is_trained_between(scenario: Scenario, first: int, second: int) -> bool:
    """Whether a layer between these two has a trained parameter, or the second one has a trained norm before its linear."""
    model = scenario.training.model
    last = model.layers[second]
    return any(trained_layers(model)[first + 1 : second]) or (last.norm is not None and not last.frozen)


def rank_of_stages_without_gradients(scenario: Scenario) -> bool:
    """Whether the stages of some rank have no gradient in some step.

    Gradients that `zero_grad` sets to zero instead of None remain, so only the first step matters then.
    """
    pipeline, training = _pipeline(scenario), scenario.training
    if pipeline is None:
        return False
    ranks = scenario.layout.mesh.size(PP)
    steps = training.steps if training.zero_grad is ZeroGrad.NONE else 1
    return any(
        _stages_without_gradients(scenario, step).issuperset(stages_of_rank(pipeline, rank, ranks))
        for step in range(steps)
        for rank in range(ranks)
    )


def _stages_without_gradients(scenario: Scenario, step: int) -> set[int]:
    """Return the stages that use no trained parameter in a step, and those whose gradients a split backward loses."""
    layout = scenario.layout
    lost = set(range(1, stages.num_stages(layout))) if has_lost_gradients(layout) else set()
    behind_frozen = _behind_frozen_layers(scenario) if always_splits_backward(scenario) else set()
    return stages_without_training(scenario.training.model, layout, step) | lost | behind_frozen
