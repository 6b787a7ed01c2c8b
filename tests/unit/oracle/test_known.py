"""Tests for the upstream issues on file: each is recognised in the smallest scenario that shows it, and in nothing near it."""

from dataclasses import replace

import pytest

from equivcheck import Outcome, Scenario, Verdict, check
from equivcheck.layouts.registry import layout_kinds
from equivcheck.mutants.registry import mutant
from equivcheck.oracle import known_predicates
from equivcheck.oracle.known import InvalidKnownIssue, KnownIssue, known_issue, known_issues, read_issues
from equivcheck.oracle.known_avoidances import WITHOUT
from equivcheck.oracle.known_predicates import NEEDS, SHOWS
from equivcheck.oracle.verdict import Difference, Divergence, Phase
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    Activation,
    Adafactor,
    AdamW,
    Axis,
    ClipNorm,
    ClipValue,
    Compile,
    Data,
    Distribution,
    Execution,
    Exercise,
    Implementation,
    Layer,
    LayerPlan,
    Layout,
    Loss,
    Mesh,
    Model,
    Norm,
    NormType,
    Parallelism,
    Pipeline,
    PipelineSchedule,
    Precision,
    Replicate,
    Replicator,
    ShardingStrategy,
    Side,
    Split,
    Spread,
    Start,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.worlds.failure import Failure, FailureKind, RankReport, RankState

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD", "ignore:Called FSDP.clip_grad_norm_")

INF, FLOAT32 = ClipNorm(norm_type=NormType.INF), Precision.FLOAT32
FULLY_SHARD = SPMD(distribution=Distribution.FULLY_SHARD)
HYBRID = FSDP1(strategy=ShardingStrategy.HYBRID_SHARD)
ONE_WEIGHT = Layer(width=1, bias=False)
COLUMN = TensorParallel(plan=(LayerPlan(split=Split.COLUMN),))
REPLICATED = Replicate(implementation=Replicator.FSDP)
PER_LAYER = FSDP1(wrapping=Wrapping.PER_LAYER)
FROZEN = Layer(width=1, bias=False, frozen=True)
ROWS = TensorParallel(plan=(LayerPlan(output=Spread.ROWS), LayerPlan()))
WHOLE = TensorParallel(plan=(LayerPlan(), LayerPlan()))


def scenario(parallelism: Parallelism, *layers: Layer, sizes: tuple[int, ...] = (2,), features: int = 1, **changes) -> Scenario:
    """A scenario with as many rows as ranks and a sum loss, unless something else is said."""
    names = next(names for names in parallelism.axes if len(names) == len(sizes))
    mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
    fields = {"data": Data(microbatches=(mesh.num_ranks,)), "loss": Loss.MSE_SUM} | changes
    training = Training(model=Model(features=features, layers=layers or (ONE_WEIGHT,)), **fields)
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(parallelism,)))


def traced(scenario: Scenario) -> Scenario:
    """The scenario with each step as one graph."""
    return replace(scenario, layout=replace(scenario.layout, execution=Execution(whole_step=True)))


def compiled(scenario: Scenario, backend: Compile = Compile.AOT_EAGER) -> Scenario:
    """The scenario with a compiled forward."""
    return replace(scenario, layout=replace(scenario.layout, execution=Execution(compile=backend)))


def over_tp(parallelism: Parallelism, *layers: Layer, tp: int = 1, split: Split = Split.REPLICATED, **changes) -> Scenario:
    """A scenario on two data ranks for each of `tp` tensor-parallel ones, all linears split alike."""
    alone = scenario(parallelism, *layers, **changes)
    mesh = Mesh(axes=(*alone.layout.mesh.axes, Axis(name="tp", size=tp)))
    plan = TensorParallel(plan=(LayerPlan(split=split),) * len(layers))
    return replace(alone, layout=Layout(mesh=mesh, parallelisms=(plan, parallelism)))


def first_cut(layer: Layer, *around: Parallelism, **changes) -> Scenario:
    """Two tensor-parallel ranks that share the first of two layers by columns."""
    names = ("dp", "tp") if around else ("tp",)
    mesh = Mesh(axes=tuple(Axis(name=name, size=1 + (name == "tp")) for name in names))
    plan = TensorParallel(plan=(LayerPlan(split=Split.COLUMN), LayerPlan(split=Split.OUTSIDE)))
    training = Training(model=Model(features=1, layers=(layer, Layer(width=2))), data=Data(microbatches=(1,)), **changes)
    return Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(plan, *around)))


def in_columns(dp: int) -> Layout:
    """Two tensor-parallel ranks for each of `dp`: a weight is cut by columns, and its rows once more."""
    mesh = Mesh(axes=(Axis(name="dp", size=dp), Axis(name="tp", size=2)))
    return Layout(mesh=mesh, parallelisms=(TensorParallel(plan=(LayerPlan(split=Split.COLUMN),)), FSDP2()))


ONE_RANK = Layout(mesh=Mesh(axes=(Axis(name="dp", size=1),)), parallelisms=(DDP(),))


def into_columns(rows: int, *, start: Layout = ONE_RANK) -> Scenario:
    """A checkpoint of one rank or others, loaded by six that cut a weight by columns and its rows once more."""
    training = Training(
        model=Model(features=1, layers=(Layer(width=rows),)), data=Data(microbatches=(12,)), loss=Loss.LINEAR_SUM, steps=2
    )
    return Scenario(training=training, layout=in_columns(3), start=Start(layout=start, steps=1))


NORMED = Layer(width=2, norm=Norm.LAYER)
SKIPPED = replace(ONE_WEIGHT, side=Side.NEVER)
TIED = (Layer(width=2, bias=False), Layer(width=2, bias=False, shares=0))
UNTIED = (Layer(width=2, bias=False), Layer(width=2, bias=False))
FEATURES = TensorParallel(plan=(LayerPlan(split=Split.COLUMN, output=Spread.FEATURES), LayerPlan(split=Split.ROW)))
CROSSED = (Layer(width=3), Layer(width=8))
"""Sharded by rows on two ranks, the gradient of the second weight comes back as a transposed product."""
FUSED = {"optimizer": AdamW(implementation=Implementation.FUSED), "loss": Loss.LINEAR_SUM}
FALLING = {"clipping": INF, "precision": FLOAT32, "steps": 5}
FROZEN = replace(ONE_WEIGHT, frozen=True)
VIEWED = replace(ONE_WEIGHT, exercise=Exercise.VIEW)
ZB = PipelineSchedule.INTERLEAVED_ZERO_BUBBLE
DUAL = Pipeline(schedule=PipelineSchedule.DUAL_PIPE_V, stages_per_rank=2, num_chunks=4)
FOUR_ROWS = Data(microbatches=(4,))
FLAT = Layer(width=3, exercise=Exercise.FLATTEN)
ONE_OUTPUT = Layer(width=1, activation=Activation.GELU)
SPLIT = Layer(width=4, exercise=Exercise.VIEW)
TURNED = {"data": Data(microbatches=(4,), batch_dim=1)}

THAWED = Layer(width=1, frozen=True)
"""Cut over two ranks the second has nothing of it, of which data parallelism makes something trainable."""
UNFLATTENED = FSDP1(use_orig_params=False)
COLUMNS = {"features": 4, "tp": 2, "split": Split.COLUMN}
LIKE = (Layer(width=4), Layer(width=3))
DIFFERENT = (Layer(width=4), Layer(width=2))
BESIDE = Layer(width=4, side=Side.EVEN_STEPS)
THRICE = {"features": 4, "data": Data(microbatches=(4,)), "loss": Loss.LINEAR_SUM, "steps": 3}
"""In the third step the first step's graph is compiled once more, for any step."""

UNEVEN = {"sizes": (3,), "loss": Loss.MSE_MEAN, "data": Data(microbatches=(3,), batch_dim=1)}
EVEN = UNEVEN | {"loss": Loss.LINEAR_MEAN}
NO_OUTPUT = Layer(width=4)
"""Cut over three ranks, two of them hold all."""

SHOWN = {
    "dtensor_mse_loss_mean_uneven": (
        scenario(FULLY_SHARD, Layer(width=5), **UNEVEN),
        [scenario(FULLY_SHARD, Layer(width=5), **EVEN), scenario(DDP(), Layer(width=5), **UNEVEN)],
    ),
    "dtensor_mse_loss_mean_of_nothing": (
        scenario(FULLY_SHARD, NO_OUTPUT, **UNEVEN),
        [scenario(FULLY_SHARD, NO_OUTPUT, **EVEN), scenario(DDP(), NO_OUTPUT, **UNEVEN)],
    ),
    "dtensor_mse_loss_mean_of_nothing_traced": (
        traced(scenario(FULLY_SHARD, NO_OUTPUT, **UNEVEN)),
        [traced(scenario(FULLY_SHARD, NO_OUTPUT, **EVEN)), scenario(DDP(), NO_OUTPUT, **UNEVEN)],
    ),
    "dtensor_mse_loss_mean": (
        scenario(SPMD(), loss=Loss.MSE_MEAN),
        [scenario(SPMD()), scenario(SPMD(), sizes=(1,), loss=Loss.MSE_MEAN), scenario(SPMD(), loss=Loss.LINEAR_MEAN)],
    ),
    "dtensor_flatten_backward_strides": (
        scenario(SPMD(), FLAT, **TURNED),
        [
            scenario(SPMD(), FLAT, data=Data(microbatches=(4,))),
            scenario(SPMD(), FLAT, loss=Loss.LINEAR_SUM, **TURNED),
            scenario(SPMD(), replace(FLAT, exercise=Exercise.VIEW), **TURNED),
            scenario(DDP(), FLAT, **TURNED),
        ],
    ),
    "dtensor_unflatten_unevenly": (
        scenario(FULLY_SHARD, SPLIT, sizes=(3,)),
        [
            scenario(SPMD(), SPLIT, sizes=(3,)),
            scenario(FULLY_SHARD, SPLIT),
            scenario(FULLY_SHARD, replace(SPLIT, exercise=Exercise.SQUEEZE), sizes=(3,)),
            scenario(DDP(), SPLIT, sizes=(3,)),
        ],
    ),
    "dtensor_view_of_one": (
        scenario(SPMD(), FLAT, sizes=(1,)),
        [
            scenario(SPMD(), FLAT, sizes=(1,), data=Data(microbatches=(2,))),
            scenario(SPMD(), FLAT),
            scenario(SPMD(), Layer(width=4), ONE_OUTPUT, sizes=(1,), loss=Loss.LINEAR_SUM),
            scenario(FULLY_SHARD, Layer(width=4), replace(ONE_OUTPUT, bias=False), sizes=(1,), loss=Loss.LINEAR_SUM),
            scenario(SPMD(), replace(FLAT, exercise=Exercise.VIEW), sizes=(1,)),
            scenario(DDP(), FLAT, sizes=(1,)),
        ],
    ),
    "fsdp1_hybrid_shard_of_one": (
        scenario(HYBRID, sizes=(2, 1)),
        [scenario(HYBRID, sizes=(1, 2)), scenario(HYBRID, sizes=(2, 2)), scenario(HYBRID, sizes=(1, 1))],
    ),
    "fsdp1_inf_norm_of_nothing": (
        scenario(FSDP1(), **FALLING),
        [
            scenario(FSDP1(), Layer(width=8, bias=False), **FALLING),
            scenario(FSDP1(use_orig_params=False), **FALLING),
            scenario(FSDP1(), **FALLING | {"clipping": ClipNorm()}),
        ],
    ),
    "sequence_parallel_unfreezes": (
        scenario(ROWS, Layer(width=2), replace(NORMED, frozen=True), sizes=(1,)),
        [
            scenario(ROWS, Layer(width=2), NORMED, sizes=(1,)),
            scenario(WHOLE, Layer(width=2), replace(NORMED, frozen=True), sizes=(1,)),
        ],
    ),
    "local_tensors_unfreeze": (
        over_tp(DDP(), FROZEN, ONE_WEIGHT),
        [
            over_tp(DDP(), ONE_WEIGHT, ONE_WEIGHT),
            over_tp(FSDP2(), FROZEN, ONE_WEIGHT),
            over_tp(REPLICATED, FROZEN, ONE_WEIGHT),
            scenario(DDP(), FROZEN, ONE_WEIGHT),
        ],
    ),
    "clip_grad_value_of_nothing": (
        scenario(FSDP1(), clipping=ClipValue()),
        [
            scenario(FSDP1(), Layer(width=8), clipping=ClipValue()),
            scenario(FSDP1(use_orig_params=False), clipping=ClipValue()),
            scenario(FSDP2(), clipping=ClipValue()),
        ],
    ),
    "inf_norm_of_empty_shard": (
        scenario(FSDP2(), clipping=INF),
        [scenario(FSDP2(), clipping=ClipNorm()), scenario(FSDP2(), Layer(width=2), clipping=INF), scenario(DDP(), clipping=INF)],
    ),
    "dtensor_rms_norm_of_features": (
        scenario(FULLY_SHARD, Layer(width=2), Layer(width=2, norm=Norm.RMS), features=2),
        [
            scenario(SPMD(), Layer(width=2), Layer(width=2, norm=Norm.RMS), features=2),
            scenario(FULLY_SHARD, Layer(width=2), NORMED, features=2),
            scenario(FULLY_SHARD, Layer(width=2, norm=Norm.RMS), features=2),
        ],
    ),
    "colwise_parallel_of_one": (
        scenario(COLUMN, Layer(width=1), sizes=(1,)),
        [
            scenario(COLUMN, Layer(width=1)),
            scenario(COLUMN, Layer(width=2), sizes=(1,)),
            scenario(COLUMN, ONE_WEIGHT, sizes=(1,)),
            scenario(TensorParallel(plan=(*COLUMN.plan, LayerPlan())), Layer(width=1, frozen=True), Layer(width=2), sizes=(1,)),
        ],
    ),
    "fused_adam_strided_gradient": (
        scenario(FULLY_SHARD, *CROSSED, features=8, **FUSED),
        [
            scenario(FULLY_SHARD, *CROSSED, features=8, optimizer=AdamW(), loss=Loss.LINEAR_SUM),
            scenario(FSDP2(), *CROSSED, features=8, **FUSED),
        ],
    ),
    "ddp_unused_parameters": (
        scenario(DDP(), SKIPPED),
        [scenario(DDP(find_unused_parameters=True), SKIPPED), scenario(DDP(), sizes=(1,)), scenario(DDP(), SKIPPED, sizes=(1,))],
    ),
    "fsdp1_norm_over_tensor_parallel": (
        over_tp(FSDP1(), Layer(width=2), tp=2, split=Split.COLUMN, clipping=ClipNorm(), precision=FLOAT32),
        [
            over_tp(FSDP1(), Layer(width=2), tp=2, clipping=ClipNorm(), precision=FLOAT32),
            over_tp(FSDP1(), Layer(width=2), split=Split.COLUMN, clipping=ClipNorm(), precision=FLOAT32),
            over_tp(FSDP2(), Layer(width=2), tp=2, split=Split.COLUMN, clipping=ClipNorm()),
        ],
    ),
    "fsdp1_flattens_nothing": (
        over_tp(FSDP1(), ONE_WEIGHT, tp=2, split=Split.COLUMN),
        [
            over_tp(FSDP1(), Layer(width=1), tp=2, split=Split.ROW),
            over_tp(FSDP1(), ONE_WEIGHT, tp=2),
            over_tp(FSDP1(), ONE_WEIGHT, Layer(width=2), tp=2, split=Split.COLUMN),
        ],
    ),
    "fsdp2_reduces_nothing": (
        over_tp(FSDP2(), ONE_WEIGHT, tp=2, split=Split.COLUMN),
        [
            over_tp(FSDP2(), Layer(width=3), tp=2, split=Split.COLUMN),
            over_tp(DDP(), ONE_WEIGHT, tp=2, split=Split.COLUMN),
            over_tp(FSDP2(), ONE_WEIGHT, tp=2),
        ],
    ),
    "fsdp1_accumulates_one_element": (
        scenario(replace(FSDP1(), use_orig_params=False), data=Data(microbatches=(2, 2))),
        [
            scenario(FSDP1(), data=Data(microbatches=(2, 2))),
            scenario(FSDP1(use_orig_params=False), data=Data(microbatches=(4,))),
            scenario(FSDP1(use_orig_params=False, no_sync=True), data=Data(microbatches=(2, 2))),
            scenario(FSDP1(use_orig_params=False), Layer(width=1), data=Data(microbatches=(2, 2))),
            scenario(FSDP1(use_orig_params=False), sizes=(1,), data=Data(microbatches=(2, 2))),
        ],
    ),
    "fsdp1_compiles_beside_gradients": (
        compiled(scenario(FSDP1(), Layer(width=2), features=2, data=Data(microbatches=(2, 4)))),
        [
            compiled(scenario(FSDP1(), Layer(width=2), features=2, data=Data(microbatches=(4, 4)))),
            compiled(scenario(FSDP1(use_orig_params=False), Layer(width=2), features=2, data=Data(microbatches=(2, 4)))),
            scenario(FSDP1(), Layer(width=2), features=2, data=Data(microbatches=(2, 4))),
        ],
    ),
    "checkpoint_of_uneven_strided_shards": (
        into_columns(rows=7),
        [into_columns(rows=6)],
    ),
    "checkpoint_between_uneven_strided_shards": (
        into_columns(rows=13, start=in_columns(2)),
        [into_columns(rows=12, start=in_columns(2)), replace(into_columns(rows=13), start=None)],
    ),
    "fsdp1_norm_of_doubles": (
        scenario(FSDP1(), clipping=ClipNorm()),
        [scenario(FSDP1(), clipping=ClipNorm(), precision=FLOAT32), scenario(FSDP1())],
    ),
    "tensor_parallel_unties": (
        scenario(WHOLE, *TIED, features=2),
        [scenario(WHOLE, *UNTIED, features=2), scenario(DDP(), *TIED, features=2)],
    ),
    "uneven_local_activations": (
        scenario(FEATURES, Layer(width=3), Layer(width=2), features=2),
        [scenario(FEATURES, Layer(width=4), Layer(width=2), features=2), scenario(WHOLE, Layer(width=3), Layer(width=2))],
    ),
    "ddp_static_graph_no_sync": (
        scenario(DDP(static_graph=True, no_sync=True), data=Data(microbatches=(2, 2))),
        [
            scenario(DDP(static_graph=True), data=Data(microbatches=(2, 2))),
            scenario(DDP(static_graph=True, no_sync=True)),
            scenario(DDP(no_sync=True), data=Data(microbatches=(2, 2))),
        ],
    ),
    "split_backward_behind_frozen_layers": (
        scenario(Pipeline(schedule=ZB), FROZEN, ONE_WEIGHT),
        [
            scenario(Pipeline(schedule=PipelineSchedule.INTERLEAVED), FROZEN, ONE_WEIGHT),
            scenario(Pipeline(schedule=ZB), ONE_WEIGHT, FROZEN),
            scenario(Pipeline(schedule=ZB), FROZEN, ONE_WEIGHT, sizes=(1,)),
        ],
    ),
    "dual_pipe_v_behind_frozen_layers": (
        scenario(DUAL, FROZEN, *(ONE_WEIGHT,) * 3, data=FOUR_ROWS),
        [
            scenario(DUAL, *(ONE_WEIGHT,) * 4, data=FOUR_ROWS),
            scenario(DUAL, FROZEN, ONE_WEIGHT, sizes=(1,), data=FOUR_ROWS),
            scenario(Pipeline(stages_per_rank=2, schedule=PipelineSchedule.LOOPED_BFS), FROZEN, *(ONE_WEIGHT,) * 3),
        ],
    ),
    "split_backward_of_view": (
        scenario(Pipeline(schedule=ZB), ONE_WEIGHT, VIEWED, ONE_WEIGHT, sizes=(3,)),
        [
            scenario(Pipeline(schedule=ZB), VIEWED, ONE_WEIGHT, VIEWED, sizes=(3,)),
            scenario(Pipeline(), ONE_WEIGHT, VIEWED, ONE_WEIGHT, sizes=(3,)),
        ],
    ),
    "dtensor_symbolic_shapes_recurse": (
        compiled(over_tp(PER_LAYER, *DIFFERENT, features=2)),
        [
            compiled(over_tp(FSDP1(), *DIFFERENT, features=2)),
            compiled(over_tp(replace(PER_LAYER, use_orig_params=False), *DIFFERENT, features=2)),
            compiled(over_tp(FSDP2(wrapping=Wrapping.PER_LAYER), *DIFFERENT, features=2)),
            over_tp(PER_LAYER, *DIFFERENT, features=2),
        ],
    ),
    "dtensor_guarded_by_its_shard": (
        compiled(over_tp(UNFLATTENED, *LIKE, **COLUMNS)),
        [
            compiled(over_tp(UNFLATTENED, *DIFFERENT, **COLUMNS)),
            over_tp(UNFLATTENED, *LIKE, **COLUMNS),
            compiled(over_tp(UNFLATTENED, *LIKE, features=2, tp=2)),
        ],
    ),
    "adafactor_of_nothing": (
        first_cut(THAWED, Replicate(), optimizer=Adafactor()),
        [first_cut(THAWED, optimizer=Adafactor()), first_cut(replace(THAWED, width=2, frozen=False), Replicate())],
    ),
    "inductor_cache_across_ranks": (
        compiled(scenario(FULLY_SHARD, BESIDE, **THRICE), Compile.INDUCTOR),
        [compiled(scenario(FULLY_SHARD, BESIDE, **THRICE)), compiled(scenario(SPMD(), BESIDE, **THRICE), Compile.INDUCTOR)],
    ),
}
"""By issue: the smallest scenario that shows it, and some that are healthy but for one thing the same."""

ISSUES = {issue.id: issue for issue in known_issues()}
REACHABLE = [issue for issue in known_issues() if issue.layouts]
"""Those that a scenario can show."""

ALSO_SHOWN = [
    ("inf_norm_of_empty_shard", over_tp(FSDP2(), Layer(width=3), tp=2, split=Split.COLUMN, clipping=INF)),
    (
        "inf_norm_of_empty_shard",
        over_tp(
            Replicate(), Layer(width=5, frozen=True), Layer(width=4), tp=4, split=Split.COLUMN, clipping=INF, precision=FLOAT32
        ),
    ),
    ("fsdp1_flattens_nothing", over_tp(PER_LAYER, ONE_WEIGHT, Layer(width=2), tp=2, split=Split.COLUMN)),
    ("fsdp1_flattens_nothing", over_tp(FSDP1(), ONE_WEIGHT, tp=2, split=Split.ROW)),
    ("fsdp2_reduces_nothing", over_tp(FSDP2(), Layer(width=4), tp=2, split=Split.ROW)),
    ("clip_grad_value_of_nothing", scenario(Pipeline(), FROZEN, ONE_WEIGHT, clipping=ClipValue())),
    (
        "split_backward_behind_frozen_layers",
        scenario(Pipeline(schedule=PipelineSchedule.ZBV, stages_per_rank=2), FROZEN, ONE_WEIGHT, sizes=(1,)),
    ),
    ("local_tensors_unfreeze", over_tp(DDP(), replace(FROZEN, side=Side.EVEN_STEPS), ONE_WEIGHT)),
    ("local_tensors_unfreeze", over_tp(FSDP1(), FROZEN, ONE_WEIGHT)),
    ("local_tensors_unfreeze", over_tp(Replicate(), FROZEN, ONE_WEIGHT)),
    ("dtensor_view_of_one", scenario(FULLY_SHARD, Layer(width=4), ONE_OUTPUT, sizes=(1,), loss=Loss.LINEAR_SUM)),
    ("dtensor_mse_loss_mean", scenario(FULLY_SHARD, Layer(width=3), sizes=(4,), loss=Loss.MSE_MEAN, features=3)),
    ("dtensor_mse_loss_mean", scenario(SPMD(), loss=Loss.MSE_MEAN, data=Data(microbatches=(4, 2)), precision=FLOAT32)),
    ("fsdp1_hybrid_shard_of_one", scenario(replace(HYBRID, use_orig_params=False), sizes=(3, 1))),
    ("clip_grad_value_of_nothing", scenario(HYBRID, sizes=(2, 2), clipping=ClipValue())),
    ("inf_norm_of_empty_shard", scenario(FULLY_SHARD, Layer(width=4), sizes=(3,), clipping=INF)),
    ("inf_norm_of_empty_shard", scenario(COLUMN, clipping=INF)),
    ("inf_norm_of_empty_shard", scenario(TensorParallel(plan=(LayerPlan(split=Split.ROW),)), clipping=INF)),
]
"""Other ways into the same issues."""


def test_each_issue_has_a_scenario() -> None:
    """Nothing is on file that no scenario is known to show."""
    assert sorted(SHOWN) == sorted(issue.id for issue in REACHABLE)


@pytest.mark.parametrize(
    ("name", "example"), [*((name, shown) for name, (shown, _) in SHOWN.items()), *ALSO_SHOWN], ids=lambda value: str(value)[:30]
)
def test_an_issue_on_file_is_known_when_it_shows(name: str, example: Scenario) -> None:
    """A check that runs into an upstream issue says which."""
    verdict = check(example, beyond=True)
    assert (verdict.outcome, verdict.known) == (Outcome.KNOWN, name), verdict.describe()


@pytest.mark.parametrize("example", [example for _, healthy in SHOWN.values() for example in healthy])
def test_what_is_near_an_issue_is_healthy(example: Scenario) -> None:
    """Without one of the things that an issue needs, nothing is wrong, so each of them is needed."""
    verdict = check(example, beyond=True)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


@pytest.mark.parametrize("issue", REACHABLE, ids=[issue.id for issue in REACHABLE])
def test_an_issue_needs_something_that_what_is_near_it_lacks(issue: KnownIssue) -> None:
    """Whatever goes wrong in a scenario that cannot show an issue, the issue does not explain it."""
    shown, healthy = SHOWN[issue.id]
    healthy = [example for example in healthy if example.start is not None or not issue.hand_over]
    tags = [{parallelism.tag for parallelism in example.layout.parallelisms} for example in healthy]
    met = [all(NEEDS[name](example) for name in issue.needs) for example in (shown, *healthy)]
    assert met[0]
    assert not any(fits and not tag.isdisjoint(issue.layouts) for fits, tag in zip(met[1:], tags, strict=True))


@pytest.mark.parametrize("name", SHOWN)
def test_an_issue_explains_nothing_else_that_goes_wrong_in_its_scenario(name: str) -> None:
    """Where an issue could show, another wrong number or another error is a finding."""
    example, _ = SHOWN[name]
    # What is avoided is checked without, so that any wrong loss there may be taken for it at first.
    phase = Phase.UPDATE if ISSUES[name].without and ISSUES[name].phase is Phase.LOSS else Phase.LOSS
    wrong = Divergence(step=0, phase=phase, tensor="loss", difference=Difference.VALUE, rank=-1, expected="1.0", actual="2.0")
    missing = replace(wrong, phase=Phase.GRADIENT, tensor="layers.0.linear.weight", difference=Difference.MISSING)
    for divergence in (wrong, missing):
        assert known_issue(_diverged(example, divergence)) is None
    assert known_issue(_crashed(example, "RuntimeError: something else")) is None


@pytest.mark.parametrize("name", [issue.id for issue in REACHABLE if issue.error])
def test_an_error_on_file_is_a_finding_where_the_issue_cannot_show(name: str) -> None:
    """The text of an error alone explains nothing: the scenario must be one in which it comes up."""
    shown, healthy = SHOWN[name]
    error = check(shown, beyond=True).reason
    assert known_issue(_crashed(shown, error)) is not None
    assert [known_issue(_crashed(example, error)) for example in healthy] == [None] * len(healthy)


def test_the_error_of_any_rank_is_looked_at() -> None:
    """A hang caused by a rank that raised is explained by what that rank raised."""
    example, _ = SHOWN["inf_norm_of_empty_shard"]
    verdict = _crashed(example, "RuntimeError: Connection closed by peer", "RuntimeError: " + check(example, beyond=True).reason)
    issue = known_issue(replace(verdict, outcome=Outcome.HUNG))
    assert issue is not None
    assert issue.id == "inf_norm_of_empty_shard"


def test_gradients_too_large_by_another_factor_are_a_finding() -> None:
    """The mean squared error explains gradients multiplied by the number of data ranks and no others."""
    example, _ = SHOWN["dtensor_mse_loss_mean"]
    right = Divergence(
        step=0,
        phase=Phase.GRADIENT,
        tensor="layers.0.linear.weight",
        difference=Difference.VALUE,
        rank=0,
        expected="-1.5",
        actual="-3.0",
    )
    assert known_issue(_diverged(example, right)) is not None
    for actual in ("-1.6", "-4.5", "3.0", "0.0"):
        assert known_issue(_diverged(example, replace(right, actual=actual))) is None


@pytest.mark.parametrize("changes", [{"step": 0}, {"actual": "0.5"}, {"tensor": "layers.0.linear.weight"}])
def test_only_a_norm_that_is_too_large_at_a_later_step_is_an_earlier_one(changes: dict[str, object]) -> None:
    """A norm that is wrong at once or too small, or wrongly clipped gradients, are findings."""
    example, _ = SHOWN["fsdp1_inf_norm_of_nothing"]
    earlier = Divergence(
        step=1, phase=Phase.CLIPPING, tensor="norm", difference=Difference.VALUE, rank=0, expected="1.0", actual="4.0"
    )
    assert known_issue(_diverged(example, earlier)) is not None
    assert known_issue(_diverged(example, replace(earlier, **changes))) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("tensor", ["layers.0.norm.weight", "layers.1.linear.weight", "layers.2.norm.weight"])
def test_an_extra_gradient_elsewhere_is_a_finding(tensor: str) -> None:
    """Sequence parallelism explains gradients of frozen norms whose input lies by rows, not of other parameters."""
    example, _ = SHOWN["sequence_parallel_unfreezes"]
    extra = Divergence(step=0, phase=Phase.GRADIENT, tensor="layers.1.norm.bias", difference=Difference.EXTRA, rank=0)
    assert known_issue(_diverged(example, extra)) is not None
    assert known_issue(_diverged(example, replace(extra, tensor=tensor))) is None


SMALL = replace(FSDP1(), wrapping=Wrapping.PER_LAYER)
TRAINED_LAST = (Layer(width=2, frozen=True), Layer(width=2, bias=False))


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (scenario(FSDP1()), True),
        (scenario(FSDP1(), sizes=(1,)), False),
        (scenario(FSDP1(use_orig_params=False)), False),
        (scenario(FSDP1(strategy=ShardingStrategy.NO_SHARD)), False),
        (scenario(FSDP1(), Layer(width=2, bias=False)), False),
        (scenario(FSDP1(), Layer(width=2, bias=False), sizes=(3,)), True),
        (scenario(FSDP1(), Layer(width=1)), False),
        (scenario(FSDP1(), Layer(width=1), sizes=(3,)), True),
        (scenario(FSDP1(), Layer(width=3, bias=False, norm=Norm.RMS), sizes=(4,)), True),
        (scenario(FSDP1(), *TRAINED_LAST, features=2), True),
        (scenario(SMALL, *TRAINED_LAST, features=2), False),
        (scenario(HYBRID, sizes=(2, 2)), True),
        (scenario(HYBRID, sizes=(2, 1)), False),
        (scenario(FSDP2()), False),
    ],
)
def test_a_rank_without_gradients_is_one_that_does_not_reach_the_clipping(example: Scenario, expected: bool) -> None:
    """The predicate says exactly on which layouts `clip_grad_value_` finds nothing to clip."""
    assert NEEDS["rank_without_gradients"](example) is expected
    clipped = replace(example, training=replace(example.training, clipping=ClipValue()))
    assert (check(clipped).known == "clip_grad_value_of_nothing") is expected


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (scenario(FSDP2(), Layer(width=4), sizes=(3,)), True),
        (scenario(FSDP2(), Layer(width=5), sizes=(3,)), False),
        (scenario(FSDP2(), Layer(width=1), sizes=(2, 1)), False),
        (scenario(FSDP2(), Layer(width=1), sizes=(1, 2)), True),
        (scenario(FSDP2(), Layer(width=2), Layer(width=1, frozen=True)), False),
        (scenario(FSDP2(), Layer(width=2, norm=Norm.RMS)), True),
        (scenario(SPMD()), False),
        (scenario(FULLY_SHARD), True),
        (scenario(TensorParallel(plan=(LayerPlan(split=Split.ROW),)), Layer(width=1), features=2), False),
        (scenario(TensorParallel(), Layer(width=1)), False),
        (scenario(DDP()), False),
    ],
)
def test_an_empty_shard_is_what_the_infinity_norm_stumbles_over(example: Scenario, expected: bool) -> None:
    """The predicate says exactly on which layouts a rank holds nothing of some gradient."""
    assert NEEDS["gradient_has_an_empty_shard"](example) is expected
    clipped = replace(example, training=replace(example.training, clipping=INF))
    assert (check(clipped).known == "inf_norm_of_empty_shard") is expected


def test_what_is_wrong_without_an_issue_as_well_is_a_finding() -> None:
    """An update that goes wrong under fused Adam is its known issue only where plain Adam is right."""
    shown, _ = SHOWN["fused_adam_strided_gradient"]
    healthy = over_tp(DDP(), Layer(width=2), Layer(width=2), optimizer=FUSED["optimizer"])

    assert check(healthy).outcome is Outcome.EQUIVALENT
    assert check(healthy, alter=mutant("masters_in_bfloat16").plant).outcome is Outcome.DIVERGED
    assert check(shown, alter=mutant("masters_in_bfloat16").plant).outcome is Outcome.DIVERGED
    assert check(traced(shown), alter=mutant("masters_in_bfloat16").plant).outcome is Outcome.DIVERGED


@pytest.mark.parametrize("name", NEEDS)
def test_each_need_holds_for_some_scenario_and_not_for_another(name: str) -> None:
    """A predicate that always or never holds narrows nothing down."""
    examples = [example for shown, healthy in SHOWN.values() for example in (shown, *healthy)]
    assert {NEEDS[name](example) for example in examples} == {True, False}


LINKS = ("https://github.com/pytorch/pytorch/", "not reported yet: ", "documented, not checked: ")


def test_issues_are_well_formed() -> None:
    """Ids are distinct, layouts exist, links lead to pytorch or say that there is none, and no predicate is left over."""
    issues = known_issues()
    assert len({issue.id for issue in issues}) == len(issues)
    assert {tag for issue in issues for tag in issue.layouts} <= set(layout_kinds())
    assert all(issue.link.startswith(LINKS) for issue in issues)
    assert {name for issue in issues for name in issue.needs} == set(NEEDS)
    assert {name for issue in issues for name in issue.shows} == set(SHOWS)
    assert {issue.without for issue in issues} - {""} == set(WITHOUT)
    assert all(function.__doc__ for function in (*NEEDS.values(), *SHOWS.values())), known_predicates.__name__


CRASH = {"id": "x", "link": "y", "torch": ">=2", "kind": "crash", "layouts": ["ddp"], "needs": ["inf_norm"], "error": "z"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"needs": ["inf_nrom"]}, "known issue 'x': needs names 'inf_nrom'; allowed: activations_cut_unevenly, "),
        ({"shows": ["inf_norm"]}, "known issue 'x': shows names 'inf_norm'; allowed: in_a_stage_behind_frozen_layers, "),
        ({"without": "inf_norm"}, "known issue 'x': without names 'inf_norm'; allowed: plain_implementation"),
        ({"kind": "crush"}, "known issue 'x': kind is 'crush'; allowed: wrong_numbers, crash, "),
        (
            {"kind": "wrong_numbers"},
            "known issue 'x': of kind wrong_numbers has the wrong evidence; allowed: phase and difference, ",
        ),
        ({"error": ""}, "known issue 'x': of kind crash has the wrong evidence; allowed: "),
        ({"error": "("}, "known issue 'x': missing ), unterminated subpattern at position 0; allowed: "),
        ({"torch": "new"}, "known issue 'x': Invalid specifier: 'new'; allowed: "),
        ({"layout": "ddp"}, "known issue 'x': lacks [], has the unknown ['layout']; allowed: "),
    ],
)
def test_an_entry_that_is_not_well_formed_is_refused_in_one_line(changes: dict[str, object], text: str) -> None:
    """The text names the entry, what is wrong with it, and what is allowed."""
    entry = "\n".join(f"{key} = {value!r}" for key, value in (CRASH | changes).items())
    assert [issue.id for issue in read_issues("[[issue]]\n" + "\n".join(f"{key} = {value!r}" for key, value in CRASH.items()))]
    with pytest.raises(InvalidKnownIssue) as caught:
        read_issues("[[issue]]\n" + entry)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)


def _diverged(example: Scenario, divergence: Divergence) -> Verdict:
    return Verdict(outcome=Outcome.DIVERGED, scenario=example, world="sim", reason="differs", divergence=divergence)


def _crashed(example: Scenario, *errors: str) -> Verdict:
    reports = tuple(RankReport(rank=rank, state=RankState.RAISED, error=error) for rank, error in enumerate(errors))
    failure = Failure(kind=FailureKind.RAISED, summary=f"rank 0 raised {errors[0]}", reports=reports)
    return Verdict(outcome=Outcome.CRASHED, scenario=example, world="sim", reason=failure.summary, failure=failure)
