"""Shapes traced for some sizes give the shapes for others, as a new trace would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.worlds.sim.dtensor.patterns import PARTICULAR, pattern_of
from unit.worlds.sim.schemas import answer, schema

aten = torch.ops.aten

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
ELEMENTWISE: dict[Any, tuple[int, tuple[Any, ...]]] = {
    aten.add.Tensor: (2, ()),
    aten.addcmul_.default: (3, ()),
    aten.copy_.default: (2, ()),
    aten.eq.Tensor: (2, ()),
    aten.lerp_.Scalar: (2, (0.5,)),
    aten.mul.Scalar: (1, (2.0,)),
    aten.pow.Tensor_Scalar: (1, (2,)),
    aten.threshold_backward.default: (2, (0.0,)),
    aten.zeros_like.default: (1, ()),
}
"""Operations with their number of tensors, and the arguments after them."""


@given(st.sampled_from(tuple(ELEMENTWISE)), SHAPES, st.data(), st.sampled_from((torch.float32, torch.float64)))
def test_an_elementwise_result_is_known_for_every_shape_of_as_many_dims(
    op: Any, shape: tuple[int, ...], data: st.DataObject, dtype: torch.dtype
) -> None:
    """The result for one shape gives that for another shape, and torch computes the same there."""
    num_tensors, others = ELEMENTWISE[op]
    other_shape = data.draw(st.tuples(*(st.integers(1, 5) for _ in shape)))
    arguments = [([torch.ones(each, dtype=dtype)] * num_tensors, each) for each in (shape, other_shape)]
    first, second = (pattern_of(schema(op, *tensors, *others)) for tensors, _ in arguments)
    assert first is not None
    assert second is not None
    assert first.key == second.key
    general = first.general(answer(op(*(tensor.clone() for tensor in arguments[0][0]), *others)))
    assert general is not PARTICULAR
    assert second.answer(general) == answer(op(*(tensor.clone() for tensor in arguments[1][0]), *others))


def test_lists_of_tensors_are_like_each_other_place_by_place() -> None:
    """Each list position has its own shape, and norms have no dims."""
    for op, others in ((aten._foreach_add.Scalar, (1.0,)), (aten._foreach_norm.Scalar, (2,))):
        small, large = ([torch.ones(rows, 3), torch.ones(rows)] for rows in (2, 4))
        first, second = (pattern_of(schema(op, tensors, *others)) for tensors in (small, large))
        assert first is not None
        assert second is not None
        assert first.key == second.key
        assert second.answer(first.general(answer(op(small, *others)))) == answer(op(large, *others))


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (aten.add.Tensor, (torch.ones(2, 3), torch.ones(3))),
        (aten.add.Tensor, (torch.ones(2, 3).T, torch.ones(3, 2))),
        (aten.add.Tensor, (torch.ones(0, 3), torch.ones(0, 3))),
        (aten.mm.default, (torch.ones(3, 3), torch.ones(3, 3))),
        (aten.unsqueeze_.default, (torch.ones(3), 0)),
        (aten._foreach_add.List, ([torch.ones(2, 3)], [torch.ones(3)])),
    ],
)
def test_what_broadcasts_or_changes_shape_is_traced(op: Any, arguments: tuple[Any, ...]) -> None:
    """No pattern exists for arguments with several shapes, other strides or no elements, or for other operations."""
    assert pattern_of(schema(op, *arguments)) is None


def test_element_types_and_dims_are_other_patterns() -> None:
    """A pattern keeps to one element type and one number of dims."""
    tensors = (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64), torch.ones(6))
    keys = [pattern.key for tensor in tensors if (pattern := pattern_of(schema(aten.neg.default, tensor))) is not None]
    assert len(set(keys)) == 3
