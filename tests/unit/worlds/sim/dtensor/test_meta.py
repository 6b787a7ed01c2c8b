"""Meta tensors give the same shapes as DTensor's fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_map_only

from equivcheck.worlds.meshes import device_mesh
from equivcheck.worlds.sim.dtensor.meta import UNKNOWN, answer_on_meta
from equivcheck.worlds.sim.ranks import SimRanks
from unit.worlds.sim.schemas import answer, schema

aten = torch.ops.aten
NUMBERS = torch.tensor([0, 1, 0])
OPERATIONS: dict[Any, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    aten._softmax.default: lambda x: (x, 1, False),
    aten.add.Tensor: lambda x: (x, x[0]),
    aten.addmm.default: lambda x: (x[:, 0], x, x.t()),
    aten.cat.default: lambda x: ([x, x], 1),
    aten.clone.default: lambda x: (x.t(),),
    aten.embedding.default: lambda x: (x, NUMBERS),
    aten.eq.Scalar: lambda x: (x, 1),
    aten.expand.default: lambda x: (x.unsqueeze(1), [-1, 3, -1]),
    aten.linalg_vector_norm.default: lambda x: (x, 2.0, [0], True),
    aten.mean.dim: lambda x: (x, [1]),
    aten.mm.default: lambda x: (x.t(), x),
    aten.mul_.Tensor: lambda x: (x.t(), 2.0),
    aten.native_layer_norm.default: lambda x: (x, [x.shape[1]], None, None, 1e-5),
    aten.nll_loss_forward.default: lambda x: (x, torch.zeros(x.shape[0], dtype=torch.int64), None, 1, -100),
    aten.select.int: lambda x: (x, 1, 0),
    aten.slice.Tensor: lambda x: (x.t(), 0, 0, 1),
    aten.squeeze.dim: lambda x: (x, 0),
    aten.sum.dim_IntList: lambda x: (x, [0], True),
    aten.t.default: lambda x: (x,),
    aten.view.default: lambda x: (x, [x.shape[1], x.shape[0]]),
}
"""Operations with arguments for a matrix."""


def by_fake_tensors(op: Any, *arguments: Any) -> Any:
    """Metadata traced by DTensor on fake tensors."""
    with FakeTensorMode() as mode:
        return answer(op(*tree_map_only(torch.Tensor, mode.from_tensor, arguments)))


@given(st.sampled_from(tuple(OPERATIONS)), st.integers(1, 5), st.integers(1, 5), st.sampled_from((torch.float32, torch.float64)))
def test_meta_tensors_give_what_fake_tensors_give(op: Any, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Sizes, strides and element types agree. Only views along dims of size 1 need fake tensors."""
    arguments = OPERATIONS[op](torch.ones(rows, columns, dtype=dtype))
    found = answer_on_meta(schema(op, *arguments))
    if found is UNKNOWN:
        assert op is aten.view.default
        assert 1 in (rows, columns)
    else:
        assert found == by_fake_tensors(op, *arguments)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.mm.default, (torch.ones(2, 3), torch.ones(2, 3))),
        (aten.nonzero.default, (torch.ones(2, 3),)),
        (aten.bernoulli.p, (torch.ones(2, 3), 0.5)),
        (aten._foreach_neg.default, ([torch.ones(2, 3)],)),
        (aten.copy_.default, (torch.ones(2, 3), torch.ones(3))),
        (aten.view.default, (torch.ones(3, 4, 1).transpose(1, 2), [3, 1, 4])),
    ],
    ids=str,
)
def test_other_answers_are_left_to_fake_tensors(op: Any, arguments: tuple[Any, ...]) -> None:
    """Errors, value-dependent shapes, random numbers, and operations with fake-tensor implementations need fake tensors."""
    assert answer_on_meta(schema(op, *arguments)) is UNKNOWN


def product_of_rows(rows: int) -> tuple[int, ...]:
    """Shape of the product of a distributed matrix with its transpose."""
    mesh = device_mesh((dist.get_world_size(),), ("dp",))
    matrix = distribute_tensor(torch.ones(rows, 3), mesh, [Shard(0)])
    return tuple((matrix.t() @ matrix).shape)


def test_ranks_trace_nothing_that_meta_tensors_tell(world: Callable[[int], SimRanks], monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor is not asked for the shape of a product, whatever its sizes."""
    seen: list[Any] = []
    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def counting(propagator: Any, of: Any) -> Any:
        seen.append(of.op)
        return original(propagator, of)

    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", counting)
    assert world(2).run(product_of_rows, 94).values == ((3, 3),) * 2
    assert aten.mm.default not in seen
