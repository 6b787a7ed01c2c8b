"""How a diagnosis names tensors, ranks, axes and factors."""

from dataclasses import replace

import numpy as np
import pytest

from equivcheck.diagnosis.diverged_run import DivergedRun, run_again
from equivcheck.diagnosis.words import count_description, gradients, name_ranks, rows_of_tensor, tensors
from unit.diagnosis import faults
from unit.diagnosis.causes import on_2


@pytest.fixture(scope="module")
def diverged() -> DivergedRun:
    """Two ranks and three microbatches."""
    found = run_again(on_2(rows=(2, 2, 2)), faults.gradients(lambda values: values.mul_(7.0)), "sim")
    assert found is not None
    return found


def test_few_tensors_are_named_and_many_counted() -> None:
    """Up to three tensors are named; from four on, two are."""
    assert tensors("a") == "`a`"
    assert tensors("abc") == "`a`, `b` and `c`"
    assert tensors("abcd") == "`a`, `b` and 2 more"


def test_ranks_and_axes(diverged: DivergedRun) -> None:
    """Singular, plural and axis sizes."""
    hybrid = replace(diverged, axis_sizes={"dp_replicate": 2, "dp_shard": 4})

    assert (name_ranks([1]), name_ranks([0, 2, 3])) == ("rank 1", "ranks 0, 2 and 3")
    assert hybrid.ranks_text(("dp_shard",)) == "the 4 dp_shard ranks"
    assert hybrid.ranks_text(("dp_replicate", "dp_shard")) == "the 2 x 4 dp_replicate x dp_shard ranks"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1, 1], [1, 1], [1, 1]], "`a`"),
        ([[0, 0], [1, 1], [0, 0]], "row 1 of `a`"),
        ([[0, 0], [1, 1], [1, 1]], "rows 1 to 2 of `a`"),
        ([[1, 1], [0, 0], [1, 1]], "`a` (4 of 6 elements)"),
        ([[0, 1], [0, 0], [0, 0]], "`a` (1 of 6 elements)"),
    ],
)
def test_elements_are_named_by_rows_where_they_are(rows: list[list[int]], words: str) -> None:
    """Elements that are not full rows are counted."""
    assert rows_of_tensor({"a": np.array(rows, dtype=np.bool_)}) == words


@pytest.mark.parametrize(
    ("count", "is_last_full", "words"),
    [
        (3, False, "row 1 of `a`, row 1 of `b` and row 1 of `c`"),
        (4, False, "row 1 of `a`, row 1 of `b` and parts of 2 more tensors"),
        (3, True, "`c`, row 1 of `a` and row 1 of `b`"),
    ],
)
def test_no_tensor_is_left_out(count: int, is_last_full: bool, words: str) -> None:
    """Tensors beyond the named ones are counted."""
    masks = {name: np.array([False, True]) for name in "abcd"[:count]}
    masks["abcd"[count - 1]] |= is_last_full
    assert rows_of_tensor(masks) == words


def test_rows_come_first_if_tensors_are_counted() -> None:
    """Else a row might also be one of the counted tensors."""
    masks = {name: np.array([name != "b", True]) for name in "abcd"}
    assert rows_of_tensor(masks | {"d": np.array([False, True])}) == "row 1 of `b`, `a` and parts of 2 more tensors"


def test_further_full_tensors_are_counted_as_such() -> None:
    """If only the named tensors are partial, the rest is not called parts."""
    assert rows_of_tensor(dict.fromkeys("abcde", np.array([True, True]))) == "`a`, `b` and 3 more tensors"


def test_gradients_come_with_their_verb(diverged: DivergedRun) -> None:
    """One, some or all."""
    weight, bias = "layers.0.linear.weight", "layers.0.linear.bias"

    assert gradients(diverged, (weight,)) == f"the gradient of `{weight}` is"
    assert gradients(diverged, (weight, bias)) == "all gradients are"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (2.0, ", the number of dp ranks"),
        (0.5, ", one over the number of dp ranks"),
        (3.0, ", the number of microbatches"),
        (1 / 3, ", one over the number of microbatches"),
        (5.0, ""),
    ],
)
def test_a_factor_is_named_by_what_it_is_the_number_of(diverged: DivergedRun, ratio: float, words: str) -> None:
    """A factor is explained by axis sizes or microbatches, or not at all."""
    assert count_description(diverged, ratio) == words
