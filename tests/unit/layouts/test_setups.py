"""Each layout's effect on a rank's setup."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate

from equivcheck.layouts.base.data_rows import rows_of
from equivcheck.layouts.composition.program import rank_program, rank_setup
from equivcheck.scenario import (
    DDP,
    FSDP1,
    FSDP2,
    SPMD,
    ActivationSharding,
    Axis,
    Data,
    Distribution,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Norm,
    Parallelism,
    Replicator,
    Scenario,
    ShardingStrategy,
    Split,
    TensorParallel,
    Training,
    Wrapping,
)
from equivcheck.scenario import Replicate as Replicated
from equivcheck.training.material import material
from equivcheck.training.read import local_values
from equivcheck.worlds import meshes
from equivcheck.worlds.trace.tensors import table_of
from equivcheck.worlds.trace.trace import Piece
from equivcheck.worlds.world import World
from support.supported import require_supported

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD")

TRAINING = Training(
    model=Model(features=3, layers=(Layer(width=5, norm=Norm.LAYER, dropout=0.5), Layer(width=2), Layer(width=3, bias=False))),
    data=Data(microbatches=(4, 8)),
    steps=2,
)
SHARED = Training(model=Model(features=3, layers=(Layer(width=3), Layer(width=3, shares=0))), data=Data(microbatches=(4,)))
FLAT_CASES = [
    FSDP1(strategy=strategy, use_orig_params=originals, wrapping=wrapping)
    for strategy in ShardingStrategy
    for originals in (True, False)
    for wrapping in Wrapping
]
TP_PLAN = TensorParallel(
    plan=(
        LayerPlan(split=Split.COLWISE, output=ActivationSharding.ROWS),
        LayerPlan(output=ActivationSharding.ROWS),
        LayerPlan(split=Split.ROWWISE),
    )
)

UNEVEN_PLAN = TensorParallel(
    plan=(LayerPlan(split=Split.COLWISE), LayerPlan(split=Split.ROWWISE), LayerPlan(split=Split.COLWISE))
)
"""Plan that shards 5 columns, 5 rows and 3 columns."""


def _scenario(parallelism: Parallelism, training: Training = TRAINING) -> Scenario:
    hybrid = isinstance(parallelism, FSDP1) and parallelism.strategy.is_hybrid
    names = parallelism.axes[1 if hybrid else 0]
    axes = tuple(Axis(name=name, size=2) for name in names)
    return Scenario(training=training, layout=Layout(mesh=Mesh(axes=axes), parallelisms=(parallelism,)))


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    """World with two ranks."""
    with World("sim", size=2) as world:
        yield world


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    """World with four ranks."""
    with World("sim", size=4) as world:
        yield world


def _pieces_and_values(scenario: Scenario) -> list[tuple[Piece, np.ndarray]]:
    setup, found = rank_setup(scenario), []
    for slot in setup.find_slots(setup.model):
        values, at = local_values(slot.parameter).reshape(-1).numpy().copy(), 0
        for piece in slot.pieces:
            found.append((piece, values[at : at + piece.numel]))
            at += piece.numel
        assert at == values.size
    setup.release()
    return found


@pytest.mark.parametrize("parallelism", FLAT_CASES, ids=str)
def test_flat_parameters_hold_every_element_once_and_at_its_place(parallelism: FSDP1, two: World, four: World) -> None:
    """Along the sharding axis, slots cover each initial parameter once with its values; replicas hold the same."""
    scenario = _scenario(parallelism)
    world = four if parallelism.strategy.is_hybrid else two
    ranks = world.run(_pieces_and_values, scenario).values
    shards = 1 if parallelism.strategy is ShardingStrategy.NO_SHARD else 2
    for name, expected in material(TRAINING).parameters.items():
        counts, values = np.zeros(expected.numel(), dtype=int), np.full(expected.numel(), np.nan)
        for piece, held in (pair for rank in ranks for pair in rank if pair[0].name == name):
            assert piece.shape == tuple(expected.shape)
            start = piece.run[0] if piece.run else 0
            counts[start : start + piece.numel] += 1
            values[start : start + piece.numel] = held
        assert set(counts) == {len(ranks) // shards}
        assert np.array_equal(values, expected.numpy().reshape(-1))


@pytest.mark.parametrize(
    "parallelism",
    [FSDP1(), FSDP1(use_orig_params=False), FSDP1(wrapping=Wrapping.PER_LAYER), FSDP2(), DDP()],
    ids=str,
)
def test_pieces_over_tensor_parallelism_are_runs_of_boxes(parallelism: Parallelism, four: World) -> None:
    """Pieces over uneven tensor-parallel shards hold every element of each initial parameter at the stated place."""
    axes = (Axis(name="dp", size=2), Axis(name="tp", size=2))
    scenario = Scenario(training=TRAINING, layout=Layout(mesh=Mesh(axes=axes), parallelisms=(UNEVEN_PLAN, parallelism)))
    ranks = four.run(_pieces_and_values, scenario).values
    drawn = material(TRAINING).parameters
    table = table_of(tuple(Piece(name=name, shape=tuple(values.shape)) for name, values in drawn.items()))
    expected = np.concatenate([values.numpy().reshape(-1) for values in drawn.values()])
    found = np.full(table.total, np.nan)
    for piece, held in (pair for rank in ranks for pair in rank if pair[0].name):
        where = table.positions(piece)
        assert where is not None
        assert np.array_equal(expected[where], held)
        found[where] = held
    assert np.array_equal(found, expected)


def _rows_taken(scenario: Scenario) -> list[tuple[int, float]]:
    setup = rank_setup(scenario)
    batch = material(scenario.training).steps[0][1]
    taken = setup.take(batch)
    inputs = taken.inputs.to_local() if isinstance(taken.inputs, DTensor) else taken.inputs
    return [next(row for row in range(8) if torch.equal(batch.inputs[row], local)) for local in inputs]


@pytest.mark.parametrize(
    "parallelism",
    [DDP(), Replicated(), Replicated(implementation=Replicator.FSDP), FSDP1(), FSDP2(), SPMD()],
    ids=lambda noun: noun.tag,
)
def test_data_parallel_ranks_take_consecutive_rows(parallelism: Parallelism, two: World) -> None:
    """Rank i among n ranks computes the i-th of n equal parts of the rows."""
    require_supported(_scenario(parallelism))
    assert two.run(_rows_taken, _scenario(parallelism)).values == ([0, 1, 2, 3], [4, 5, 6, 7])


def test_hybrid_ranks_take_rows_row_major_over_the_mesh(four: World) -> None:
    """The last mesh axis has neighbouring rows."""
    scenario = _scenario(FSDP1(strategy=ShardingStrategy.HYBRID_SHARD))
    assert four.run(_rows_taken, scenario).values == ([0, 1], [2, 3], [4, 5], [6, 7])


def test_masks_are_cut_with_the_rows() -> None:
    """A rank's dropout masks belong to its rows."""
    batch = material(TRAINING).steps[0][0]
    part = rows_of(batch, 1, 2)
    assert torch.equal(part.masks[0], batch.masks[0][2:])  # type: ignore[index, arg-type]
    assert part.masks[1:] == (None, None)


def _placements(scenario: Scenario) -> dict[str, str]:
    model = rank_setup(scenario).model
    return {name: repr(getattr(parameter, "placements", None)) for name, parameter in model.named_parameters()}


def test_tensor_parallelism_leaves_no_plain_parameter(two: World) -> None:
    """Replicated layers and norms have DTensor parameters, just as split layers do."""
    placements = two.run(_placements, _scenario(TP_PLAN)).values[0]
    assert set(placements) == set(material(TRAINING).parameters)
    assert "None" not in placements.values()
    assert placements["layers.1.linear.weight"] == placements["layers.0.norm.weight"] == repr((Replicate(),))


def _num_weights(scenario: Scenario) -> int:
    return sum(1 for _ in rank_setup(scenario).model.parameters())


def test_spmd_keeps_shared_weights_shared(two: World) -> None:
    """A weight shared by two layers is distributed once."""
    scenario = _scenario(SPMD(distribution=Distribution.FULLY_SHARD), SHARED)
    assert two.run(_num_weights, scenario).values == (3, 3)


def _gradient_placements(scenario: Scenario) -> list[bool]:
    setup = rank_setup(scenario)
    batch = setup.take(material(scenario.training).steps[0][0])
    setup.module(batch.inputs, batch.masks, 0).sum().backward()
    return [parameter.grad.placements == parameter.placements for parameter in setup.model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("parallelism", [TP_PLAN, SPMD(), SPMD(distribution=Distribution.FULLY_SHARD)], ids=lambda noun: noun.tag)
def test_gradients_lie_where_their_parameters_do(parallelism: Parallelism, two: World) -> None:
    """No gradient stays partial."""
    require_supported(_scenario(parallelism))
    assert all(all(rank) for rank in two.run(_gradient_placements, _scenario(parallelism)).values)


def _mesh_objects(scenario: Scenario) -> bool:
    shape, names = scenario.layout.mesh.shape, scenario.layout.mesh.names
    before = meshes.device_mesh(shape, names)
    rank_setup(scenario)
    return meshes.device_mesh(shape, names) is before


def test_meshes_are_kept_between_runs(two: World) -> None:
    """A second setup creates no process groups."""
    assert all(two.run(_mesh_objects, _scenario(DDP())).values)


def _altered_last(scenario: Scenario) -> tuple[float, bool]:
    seen: list[float] = []
    trace = rank_program(scenario, lambda setup: seen.append(setup.loss_scale))
    return seen[0], len(trace.steps) == scenario.training.steps


def test_a_fault_is_planted_after_the_layout_was_applied(two: World) -> None:
    """`alter` gets the setup after the layout has been applied."""
    assert two.run(_altered_last, _scenario(DDP())).values == ((2, True), (2, True))
