"""Parts of fused, transposed and sharded tensors add up to the sketch and the hash of the full tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equivcheck.errors import UsageError
from equivcheck.recording.adapters.adapter import Adapter
from equivcheck.recording.adapters.cuts import require_declared
from equivcheck.recording.adapters.names import require_names
from equivcheck.recording.assemble import Cover, Part, assemble
from equivcheck.recording.exact import ExactHash
from equivcheck.recording.trace import Entry, Moment
from equivcheck.worlds.trace.pieces import select_piece
from equivcheck.worlds.trace.trace import Piece, Slot
from unit.recording.partitions import partitions

SEEDS = st.integers(0, 2**32 - 1)


def entries(names: Any, parameters: dict[str, torch.Tensor], pieces: list[tuple[str, Piece]]) -> list[Entry]:
    """All pieces of parameters, recorded under a name map; each piece as a rank of its own would do it."""
    adapter = Adapter(require_declared(None, None), require_names(names))
    adapter.learn(
        [],
        [Slot(parameter=values, pieces=(Piece(name=name, shape=tuple(values.shape)),)) for name, values in parameters.items()],
        [],
    )
    rows = []
    for name, piece in pieces:
        flat = torch.from_numpy(select_piece(parameters[name].numpy(), piece).copy())
        rows.append(((piece,), flat if piece.run is not None else flat.view(piece.size or piece.shape)))
    return list(adapter.entries(Moment.START, rows, exactly=True))


def full(found: list[Entry], name: str) -> ExactHash:
    """The hash of a tensor, added up over all parts, which cover it once."""
    parts = [Part(rank=0, piece=entry.piece, value=entry.exact) for entry in found if entry.piece.name == name and entry.exact]
    whole = assemble(parts)
    assert whole.cover is Cover.ONCE
    assert whole.value is not None
    return whole.value


def expected(name: str, values: torch.Tensor) -> ExactHash:
    """The hash of a full tensor."""
    return full(entries(None, {name: values}, [(name, Piece(name=name, shape=tuple(values.shape)))]), name)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int, int, bool]:
    """Shapes of parts, the dim along which they are fused, groups, and whether they are transposed first."""
    num_dims, groups, transpose = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.booleans())
    transpose = transpose and num_dims > 1
    dim = draw(st.integers(0, num_dims - 1))
    common = draw(st.lists(st.integers(1, 5), min_size=num_dims, max_size=num_dims))
    shapes = []
    for _ in range(draw(st.integers(1, 3))):
        shape = [*common[:dim], groups * draw(st.integers(1, 4)), *common[dim + 1 :]]
        shapes.append(tuple([*shape[:-2], shape[-1], shape[-2]] if transpose else shape))
    return shapes, dim, groups, transpose


@given(st.data(), cases(), SEEDS)
def test_parts_of_a_fused_tensor_are_the_fused_tensor(
    data: st.DataObject, case: tuple[list[tuple[int, ...]], int, int, bool], seed: int
) -> None:
    """For any partition of each part over ranks, boxes and runs, bit for bit."""
    shapes, dim, groups, transpose = case
    generator = torch.Generator().manual_seed(seed)
    parameters = {f"p{number}": torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    turned = [values.transpose(-1, -2) if transpose else values for values in parameters.values()]
    chunks = [values.chunk(groups, dim) for values in turned]
    fused = torch.cat([torch.cat([own[group] for own in chunks], dim) for group in range(groups)], dim)
    pieces = [
        (name, piece) for name, values in parameters.items() for piece in data.draw(partitions(tuple(values.shape), name=name))
    ]
    names = {"fused": {"parts": [*parameters], "dim": dim, "groups": groups, "transpose": transpose}}
    assert full(entries(names, parameters, pieces), "fused") == expected("fused", fused)


@given(st.data(), st.sampled_from([(4, 3), (2, 3, 4), (70, 33), (1, 5)]), SEEDS)
def test_a_transposed_tensor_is_recorded_transposed(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    """In all parts that ranks have of it."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    pieces = [("own", piece) for piece in data.draw(partitions(shape, name="own"))]
    found = entries({"theirs": {"name": "own", "transpose": True}}, {"own": values}, pieces)
    assert full(found, "theirs") == expected("theirs", values.transpose(-1, -2).contiguous())


def test_patterns_keep_their_texts_and_the_first_one_counts() -> None:
    """State is renamed as well."""
    adapter = Adapter(require_declared(None, None), require_names({"first": "h.0.w", "layers.*.up.*": "h.*.c_fc.*"}))
    own = [Piece(name=name, shape=(1,)) for name in ("h.0.w", "h.11.c_fc.w", "rest")]
    adapter.learn([], [Slot(parameter=torch.ones(1), pieces=(piece,)) for piece in own], [])
    rows = [((Piece(name=name, shape=(1,)),), torch.ones(1)) for name in ("h.0.w", "h.11.c_fc.w/exp_avg", "rest")]
    assert [entry.piece.name for entry in adapter.entries(Moment.STATE, rows)] == ["first", "layers.11.up.w/exp_avg", "rest"]
    assert adapter.notes == ()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "names [] is not valid: it is not a dict"),
        ({"a": 1}, "names['a']: 1 is not valid"),
        ({"a": {"b": "c"}}, "In TOML, put names with dots in quotes"),
        ({"a": {"name": "b", "dim": 0}}, "names['a']"),
        ({"a": {"parts": "b"}}, "names['a']"),
        ({"a": {"parts": ["b"], "groups": 0}}, "names['a']"),
        ({"*.a": "b"}, "with as many * in each name as in the new one"),
        ({"a": "b", "c": "b"}, "names['c'] is not valid: 'b' already occurs in the entry 'a'"),
    ],
)
def test_a_name_map_of_another_form_is_refused(names: Any, text: str) -> None:
    """With the entry."""
    with pytest.raises(UsageError) as raised:
        require_names(names)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"b": "a"}, "'b' and 'a' would both be 'b'"),
        ({"n.a": "c", "n.*": "*"}, "'a' and 'c' would both be 'n.a'"),
        ({"q": {"parts": ["a", "none"]}}, "the model has 'a', but no tensor 'none'"),
        ({"q": {"parts": ["a", "c"], "dim": 1}}, "shapes (4, 3), (2, 3) differ in a dim other than 1"),
        ({"q": {"parts": ["a", "b"]}}, "shapes (4, 3), (3,) have no dim 0, or different numbers of dims"),
        ({"q": {"parts": ["a", "c"], "groups": 4}}, "dim 0 of the shapes (4, 3), (2, 3) cannot be split into 4 equal groups"),
        ({"q": {"name": "b", "transpose": True}}, "shape (3,) cannot be transposed"),
    ],
)
def test_a_name_map_that_does_not_fit_the_model_is_refused(names: Any, text: str) -> None:
    """With the tensors."""
    shapes = {"a": (4, 3), "b": (3,), "c": (2, 3)}
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(UsageError) as raised:
        entries(names, parameters, [(name, Piece(name=name, shape=shape)) for name, shape in shapes.items()])
    assert text in str(raised.value)
