"""FSDP over tensor parallelism: gradients beside those of FSDP alone, and the collectives of one forward and backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from equivcheck import Outcome, check
from equivcheck.layouts.composition.limits import repair_layout, repair_training
from equivcheck.layouts.composition.program import rank_program
from equivcheck.oracle.comparison.assemble import Assembler
from equivcheck.oracle.reference.reference import ReferenceRun
from equivcheck.scenario import (
    FSDP1,
    ActivationSharding,
    Axis,
    Data,
    Layer,
    LayerPlan,
    Layout,
    Mesh,
    Model,
    Norm,
    Scenario,
    Split,
    TensorParallel,
    Training,
)
from equivcheck.strategies import fsdp1, fsdp2
from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.trace.differences import Phase
from equivcheck.worlds.trace.trace import Snapshot
from support.supported import require_mended
from support.verdicts import require_predicted

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

FEW = settings(deadline=None, max_examples=max(6, settings().max_examples // 16))
SIZES = st.sampled_from([(2, 2), (3, 2), (2, 3), (2, 1), (4, 2)])
COLUMN_ROW = (LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES), LayerPlan(split=Split.ROWWISE))
SEQUENCE = (
    LayerPlan(output=ActivationSharding.ROWS),
    LayerPlan(split=Split.COLWISE, output=ActivationSharding.FEATURES),
    LayerPlan(split=Split.ROWWISE),
)
PLANS = st.sampled_from(
    [(*COLUMN_ROW, LayerPlan(split=Split.NOT_IN_PLAN)), (*SEQUENCE, LayerPlan(split=Split.NOT_IN_PLAN)), (*SEQUENCE, LayerPlan())]
)
"""The last layer is outside the plan, or whole inside it."""


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Scenario, Scenario]:
    """The same training under FSDP over tensor parallelism, and under the same FSDP alone; none that is on file to crash."""
    plan, (data_ranks, tp), parallelism = draw(PLANS), draw(SIZES), draw(st.one_of(fsdp2(), fsdp1()))
    parallelism = replace(parallelism, mixed_precision=None)
    if isinstance(parallelism, FSDP1):
        parallelism = replace(parallelism, strategy=FSDP1().strategy, use_orig_params=True, no_sync=False)
    norms = st.sampled_from([None, Norm.LAYER, Norm.RMS])
    layers = [Layer(width=tp * draw(st.integers(1, 4)), bias=draw(st.booleans())) for _ in plan]
    for index, entry in enumerate(plan):
        if tp == 1 and entry.split is Split.COLWISE and layers[index].width == 1:
            layers[index] = replace(layers[index], bias=False)  # the known issue colwise_parallel_of_one
    for index, entry in enumerate(plan):
        if (
            index
            and plan[index - 1].output is not ActivationSharding.FEATURES
            and layers[index - 1].width > 1
            and entry.split is not Split.ROWWISE
        ):
            layers[index] = replace(layers[index], norm=draw(norms))
    data = Data(microbatches=(data_ranks * tp * draw(st.integers(1, 2)),))
    model = Model(features=draw(st.integers(1, 5)), layers=tuple(layers))
    training = Training(model=model, data=data, steps=1, seed=draw(st.integers(0, 2**16)))
    over, alone = Axis(name="dp", size=data_ranks), Mesh(axes=(Axis(name="dp", size=data_ranks),))
    layout = Layout(mesh=Mesh(axes=(over, Axis(name="tp", size=tp))), parallelisms=(TensorParallel(plan=plan), parallelism))
    layout = repair_layout(layout)
    training = repair_training(training, layout)
    return (
        Scenario(training=training, layout=layout),
        Scenario(training=training, layout=Layout(mesh=alone, parallelisms=layout.parallelisms[1:])),
    )


def _first_gradients(scenario: Scenario) -> list[Snapshot]:
    """What each rank has after the first backward."""
    return [trace.steps[0].gradients for trace in ranks("sim", scenario.layout.mesh.num_ranks).run(rank_program, scenario).values]


def _full_gradient(scenario: Scenario) -> np.ndarray:
    """The gradient of all parameters as one vector."""
    (expected,) = (moment for moment in ReferenceRun(scenario.training).reference().moments if moment.phase is Phase.GRADIENT)
    assembled = Assembler().assemble(expected, _first_gradients(scenario))
    assert not assembled.misfits
    assert assembled.covered.all()
    return assembled.values


@FEW
@given(_pairs())
def test_gradients_over_tensor_parallelism_are_those_without(pair: tuple[Scenario, Scenario]) -> None:
    """Put together, flattened, they equal those of FSDP alone and of one device, within the noise of rounding; none is NaN."""
    verdicts = [check(scenario) for scenario in pair]
    for verdict in verdicts:
        require_mended(verdict)
    assert {verdict.outcome for verdict in verdicts} <= {Outcome.EQUIVALENT, Outcome.INCONCLUSIVE}
    both, alone = map(_full_gradient, pair)
    (expected,) = (moment for moment in ReferenceRun(pair[0].training).reference().moments if moment.phase is Phase.GRADIENT)
    assert np.isfinite(both).all()
    assert np.linalg.norm(both - alone) <= 2 * np.linalg.norm(expected.tolerances)


def _held(snapshot: Snapshot) -> dict[str, bytes]:
    """What a rank holds of each tensor."""
    found, at = {}, 0
    for piece in snapshot.pieces:
        found[piece.name] = snapshot.values[at : at + piece.numel].tobytes()
        at += piece.numel
    return found


@FEW
@given(_pairs())
def test_what_is_not_split_has_one_gradient_on_all_tensor_parallel_ranks(pair: tuple[Scenario, Scenario]) -> None:
    """Norms, layers whole inside the plan and layers outside it agree bit for bit."""
    scenario, _ = pair
    plan, tp = scenario.layout.parallelisms[0].plan, scenario.layout.mesh.size("tp")
    held = [_held(snapshot) for snapshot in _first_gradients(scenario)]
    for first in range(0, len(held), tp):
        for name, values in held[first].items():
            split = plan[int(name.split(".")[1])].split
            if "norm" in name or split in (Split.REPLICATED, Split.NOT_IN_PLAN) or (split is Split.ROWWISE and "bias" in name):
                assert all(other[name] == values for other in held[first : first + tp]), name


@dataclass(frozen=True)
class _Sizes:
    """A norm and two linears with sequence parallelism around them."""

    data_ranks: int
    tp: int
    rows: int
    features: int
    hidden: int
    norm: str
    bias: bool


@st.composite
def _sizes(draw: st.DrawFn) -> _Sizes:
    data_ranks, tp = draw(st.sampled_from([(2, 2), (3, 2), (2, 3), (2, 4)]))
    return _Sizes(
        data_ranks=data_ranks,
        tp=tp,
        rows=tp * draw(st.integers(1, 3)),
        features=draw(st.integers(1, 6)),
        hidden=tp * draw(st.integers(1, 4)),
        norm=draw(st.sampled_from(["RMSNorm", "LayerNorm"])),
        bias=draw(st.booleans()),
    )


def _pass_forward_and_back(sizes: _Sizes, wrap: str, passes: int) -> None:
    mesh = device_mesh((sizes.data_ranks, sizes.tp), ("dp", "tp"))
    norm, linear = getattr(nn, sizes.norm), partial(nn.Linear, bias=sizes.bias)
    model = nn.Sequential(norm(sizes.features), linear(sizes.features, sizes.hidden), linear(sizes.hidden, sizes.features))
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh["tp"], plan)
    wrapped: nn.Module = model
    if wrap == "fsdp2":
        fully_shard(model, mesh=mesh["dp"])
    else:
        wrapped = FullyShardedDataParallel(model, device_mesh=mesh["dp"], device_id=torch.device("cpu"), use_orig_params=True)
    for _ in range(passes):
        wrapped(torch.ones(sizes.rows // sizes.tp, sizes.features)).sum().backward()


def _calls(sizes: _Sizes, wrap: str, passes: int) -> list[Counter[tuple[str, bool]]]:
    """Per rank, how often each collective was issued along tp (or else dp)."""
    run = ranks("sim", sizes.data_ranks * sizes.tp).run(_pass_forward_and_back, sizes, wrap, passes)
    return [
        Counter((call.op.partition(".")[0], call.ranks[1] - call.ranks[0] == 1) for call in calls if len(call.ranks) > 1)
        for calls in run.calls
    ]


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
@FEW
@given(sizes=_sizes())
def test_one_pass_issues_exactly_the_expected_collectives(wrap: str, sizes: _Sizes) -> None:
    """Along tp sequence parallelism gathers and scatters twice, along dp FSDP once; the norm's parameters are reduced once each.

    The bias of the row-parallel linear is replicated as well, but its gradient comes from what has been gathered.
    """
    expected = {
        ("all_gather", True): 2,
        ("reduce_scatter", True): 2,
        ("all_reduce", True): 1 if sizes.norm == "RMSNorm" else 2,
        ("all_gather", False): 1,
        ("reduce_scatter", False): 1,
    }
    for once, twice in zip(_calls(sizes, wrap, 1), _calls(sizes, wrap, 2), strict=True):
        assert dict(twice - once) == expected


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("split", [Split.ROWWISE, Split.COLWISE])
def test_a_gradient_goes_through_frozen_views_of_a_flat_parameter(split: Split, width: int) -> None:
    """Behind a frozen layer in one unit with trained ones the input needs a gradient, and its communication is expected."""
    layers = (Layer(width=width, frozen=True), Layer(width=width))
    training = Training(model=Model(features=width, layers=layers), data=Data(microbatches=(2,)))
    mesh = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=2)))
    plan = TensorParallel(plan=(LayerPlan(split=Split.NOT_IN_PLAN), LayerPlan(split=split)))

    require_predicted(Scenario(training=training, layout=Layout(mesh=mesh, parallelisms=(plan, FSDP1()))))
