"""The property: gradients are reduced in the buckets that their sizes predict, neither more nor fewer nor larger ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivcheck import Scenario
from equivcheck.layouts.composition.program import rank_program
from equivcheck.layouts.parallelisms.ddp.buckets import (
    MEBIBYTE,
    Bucketing,
    Reductions,
    ready_parameters,
    reductions,
    trained_parameters,
)
from equivcheck.scenario import DDP, Compression, Precision
from equivcheck.strategies import scenarios
from equivcheck.training.material import material
from equivcheck.worlds.call import Call
from equivcheck.worlds.pool import ranks

pytestmark = pytest.mark.filterwarnings("ignore")

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
BYTES = {Precision.FLOAT64: 8, Precision.FLOAT32: 4}
FP16_BYTES = 2


def _all_reduces(calls: tuple[Call, ...]) -> list[int]:
    return [call.num_bytes for call in calls if call.op == "all_reduce.sum"]


def _flat(expected: Iterator[Reductions], compression: int = 1) -> list[int]:
    sent: list[int] = []
    for one in expected:
        used = [one.used_map] if one.used_map else []
        buckets = [num_bytes // compression for num_bytes in one.buckets]
        sent += [*used, *buckets] if one.used_map_first else [*buckets, *used]
    return sent


def _bucketing(scenario: Scenario, ddp: DDP) -> Bucketing:
    training = scenario.training
    names, values = trained_parameters(training.model), material(training).parameters
    return Bucketing(
        num_bytes=tuple(values[name].numel() * BYTES[training.precision] for name in names),
        ready=tuple(map(names.index, ready_parameters(training.model, autocast=ddp.autocast is not None))),
        cap_mb=ddp.bucket_cap_mb,
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph,
    )


@settings(UNHURRIED, max_examples=max(15, settings().max_examples * 3 // 20))
@given(scenarios(layouts=("ddp",), max_ranks=3))
def test_ddp_reduces_the_buckets_that_sizes_predict(scenario: Scenario) -> None:
    """Count, order and bytes of all-reduces of a whole training follow from parameter sizes and DDP's options."""
    (ddp,) = scenario.layout.parallelisms
    assert isinstance(ddp, DDP)
    assume(not (ddp.static_graph and ddp.no_sync))  # crashes upstream
    model = scenario.training.model
    assume(not model.balances and not model.has_router_bias)  # their counts are reduced as well
    run = ranks("sim", scenario.layout.mesh.num_ranks).run(rank_program, scenario)
    training = scenario.training
    num_backwards = sum(1 if ddp.no_sync else len(training.microbatches_at(step)) for step in range(training.steps))
    compression = 1 if ddp.compression is Compression.NONE else BYTES[training.precision] // FP16_BYTES
    expected = _flat(islice(reductions(_bucketing(scenario, ddp)), num_backwards), compression)
    assert [_all_reduces(calls) for calls in run.calls] == [expected] * len(run.calls)


class _Vectors(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes)

    def forward(self) -> torch.Tensor:
        """The product of all sums, multiplied in order."""
        product = torch.ones(())
        for vector in self.vectors:
            product = product * vector.sum()
        return product


def _reduce_vectors(sizes: list[int], find_unused_parameters: bool) -> None:
    model = DistributedDataParallel(_Vectors(sizes), find_unused_parameters=find_unused_parameters)
    for _ in range(3):
        model().backward()


@settings(UNHURRIED, max_examples=10)
@given(
    st.lists(st.sampled_from((1, 1000, MEBIBYTE // 8, 3 * MEBIBYTE // 8, 14 * MEBIBYTE // 8)), min_size=1, max_size=6),
    st.booleans(),
)
def test_the_first_bucket_is_small_where_no_size_is_given(sizes: list[int], find_unused_parameters: bool) -> None:
    """By default the first bucket is closed at 1 MiB and others at 25 MiB."""
    run = ranks("sim", 2).run(_reduce_vectors, sizes, find_unused_parameters)
    bucketing = Bucketing(
        num_bytes=tuple(8 * size for size in sizes),
        ready=tuple(reversed(range(len(sizes)))),
        find_unused_parameters=find_unused_parameters,
    )
    assert _all_reduces(run.calls[1]) == _flat(islice(reductions(bucketing), 3))
