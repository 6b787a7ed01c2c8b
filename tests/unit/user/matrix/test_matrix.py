"""`Matrix`: one training, a row for each layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import equivcheck
from equivcheck import NotEquivalent, Outcome, UsageError
from equivcheck.user.matrix.matrix import ARGUMENTS, OF_LAYOUT, OF_TRAINING
from equivcheck.user.matrix.result import MatrixResult
from unit.user.matrix.trainings import NUM_PARAMETERS, batches, in_ddp, matrix_of, raises, shared, summed


def test_a_row_has_what_people_look_at_first() -> None:
    """A row has outcome, norm ratio, loss, calls and bytes."""
    found = matrix_of({"right": {"parallelize": in_ddp}, "doubled": {"parallelize": summed}}).run()
    right, doubled = found.rows
    assert (right.name, right.outcome, right.first_difference) == ("right", "equivalent", "")
    assert doubled.first_difference == "step 0 gradient weight"
    assert right.measures is not None
    assert doubled.measures is not None
    assert right.measures.norm_ratio == pytest.approx(1.0, rel=1e-12)
    assert doubled.measures.norm_ratio == pytest.approx(2.0, rel=1e-12)
    assert right.measures.loss == pytest.approx(right.measures.expected_loss, rel=1e-12)
    assert (right.measures.num_calls, right.measures.num_bytes) == (1, 8 * NUM_PARAMETERS)
    assert (doubled.measures.num_calls, doubled.measures.num_bytes) == (2, 8 * NUM_PARAMETERS)
    assert right.milliseconds > 0
    assert found["doubled"] is doubled


def test_calls_of_setup_and_of_reading_are_no_part_of_a_step() -> None:
    """Collectives in `full_tensors` do not count as communication."""

    def read(module: Any) -> dict[str, torch.Tensor]:
        dist.all_reduce(torch.ones(1))
        return dict(module.module.named_parameters())

    row = matrix_of({"read": {"parallelize": in_ddp, "full_tensors": read}}, batches=batches(steps=3)).run()["read"]
    assert row.measures is not None
    assert (row.outcome, row.measures.num_calls) == ("equivalent", 1)


def test_a_layout_that_is_wrong_on_purpose_passes_as_long_as_it_is_wrong() -> None:
    """An expected outcome passes, and any other fails."""
    assert matrix_of({"doubled": {"parallelize": summed, "expected": "diverged"}}).run().is_passed
    mended = matrix_of({"mended": {"parallelize": in_ddp, "expected": "diverged"}}).run()
    assert not mended.is_passed
    with pytest.raises(NotEquivalent, match="equivalent, expected diverged"):
        mended.assert_passed()


def test_a_layout_that_cannot_be_checked_is_a_row_and_the_others_go_on() -> None:
    """Invalid arguments become the row's error, and a crash becomes a verdict."""
    layouts = {
        "three": {"mesh": {"dp": 3}, "parallelize": in_ddp},
        "crash": {"parallelize": raises},
        "right": {"parallelize": in_ddp},
    }
    found = matrix_of(layouts).run()
    assert [row.outcome for row in found.rows] == ["not checked", "crashed", "equivalent"]
    assert "4 rows, which do not split evenly over dp 3" in found["three"].first_difference
    assert "no <model>" in found["crash"].first_difference
    assert not found.is_passed
    assert all(
        text in found.describe() for text in ("NOT CHECKED: ", "CRASHED: ", "3 layouts: 1 not checked; 1 crashed; 1 equivalent")
    )


def wide_matrix(names: tuple[str, ...], **options: Any) -> MatrixResult:
    """Rows for layouts with a long mesh."""
    mesh = {"dp_replicate": 2, "dp_shard": 1}
    return matrix_of({name: {"mesh": mesh, "parallelize": summed, **options} for name in names}).run()


def test_a_narrow_table_leaves_out_columns_but_neither_layout_nor_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layout has one line. Differences stand below, wrapped, so that three layouts on one mesh stay distinct."""
    names = ("FSDP2 x TP, sequence parallel", "FSDP2 x TP, vocabulary parallel", "FSDP2 x TP")
    found = wide_matrix(names, expected="diverged")
    narrow = found.describe().splitlines()
    assert max(map(len, narrow)) <= 80
    assert narrow[0].split() == ["layout", "outcome", "norm", "ratio", "first", "loss"]
    assert [line[:31].strip() for line in narrow[1:4]] == list(names)
    assert all("diverged, as expected" in line for line in narrow[1:4])
    assert " ".join(narrow).count(": step 0 gradient weight") == 3

    monkeypatch.setenv("COLUMNS", "200")
    wide = found.describe().splitlines()
    assert wide[0].split() == ["layout", "mesh", "outcome", "norm", "ratio", "first", "loss", "calls", "bytes", "ms"]
    assert all("dp_replicate 2 x dp_shard 1" in line for line in wide[1:4])


def test_names_wider_than_the_screen_are_not_cut() -> None:
    """The line is too long then, but it says which layout has which outcome."""
    name = "x" * 100
    assert f"{name}  diverged, as expected" in wide_matrix((name,), expected="diverged").describe()


def test_whole_stacks_are_shown_if_asked_for() -> None:
    """The table's details are short, and the files have everything."""
    found = matrix_of({"crash": {"parallelize": raises}}).run()
    assert "stack on ranks 0, 1:" not in found.describe()
    assert "stack on ranks 0, 1:" in found.describe(verbose=True)
    assert "stack on ranks 0, 1:" in found["crash"].details
    assert "CRASHED: 'crash' on dp 2" in found.describe()


def test_what_one_device_raises_is_told_in_each_row() -> None:
    """The user's own exception is the row's error."""

    def broken() -> Any:
        raise ZeroDivisionError("by the user")

    found = matrix_of({"one": {"parallelize": in_ddp}}, model=broken).run()
    assert found["one"].error == "ZeroDivisionError: by the user"


def test_every_layout_gets_the_same_batches() -> None:
    """A generator of batches is read only once."""
    found = matrix_of({"one": {"parallelize": in_ddp}, "other": {"parallelize": in_ddp}}).run()
    losses = {row.measures.loss for row in found.rows if row.measures is not None}
    assert len(losses) == 1
    assert found.is_passed


def test_layouts_are_run_in_order_and_told_of_one_by_one() -> None:
    """Requested layouts run in matrix order."""
    told: list[tuple[str, int]] = []
    layouts = {name: {"parallelize": in_ddp} for name in ("a", "b", "c")}
    found = matrix_of(layouts).run("c", "a", listener=lambda row, number: told.append((row.name, number)))
    assert told == [("a", 1), ("c", 2)]
    assert (found.asked, found.is_passed) == (2, True)


def test_a_layout_comes_before_what_all_share() -> None:
    """A layout's own argument overrides a shared one."""
    crashed = matrix_of({"own": {"parallelize": raises}, "shared": {}}, parallelize=in_ddp).run()
    assert [row.verdict.outcome for row in crashed.rows if row.verdict] == [Outcome.CRASHED, Outcome.EQUIVALENT]


def test_matrix_checks_at_once() -> None:
    """`matrix` is short for `Matrix(...).run()`."""
    found = equivcheck.matrix(layouts={"ddp": {"mesh": {"dp": 2}, "parallelize": in_ddp}}, **shared())
    assert found.is_passed


def test_every_argument_of_check_training_is_shared_or_a_layouts_own() -> None:
    """No argument is both."""
    assert set(OF_TRAINING) <= set(ARGUMENTS)
    assert {"mesh", "parallelize", "rank_step", "shard", "world"} <= set(OF_LAYOUT)


@pytest.mark.parametrize(
    ("layouts", "changes", "names"),
    [
        ({}, {}, "layouts {} is not valid: it is empty"),
        ([], {}, "layouts [] is not valid"),
        (
            {"a": {"parallelize": in_ddp, "mash": 1}},
            {},
            "'mash' in layout 'a' is not valid: there is no such argument",
        ),
        ({"a": {"parallelize": in_ddp, "loss": 1}}, {}, "'loss' in layout 'a' is not valid: all layouts share it"),
        ({"a": {"parallelize": in_ddp, "keep_dtype": True}}, {}, "'keep_dtype' in layout 'a' is not valid: all layouts share it"),
        (
            {"a": {"parallelize": in_ddp, "dropout_masks": True}},
            {},
            "'dropout_masks' in layout 'a' is not valid: all layouts",
        ),
        ({"a": {}}, {}, "it has no parallelize. Expected values for model, parallelize, mesh, batches"),
        ({"a": {"parallelize": in_ddp, "mesh": {"dp": 0}}}, {}, "axis 'dp' has size 0"),
        ({"a": {"parallelize": in_ddp, "expected": "wrong"}}, {}, "expected 'wrong' in layout 'a' is not valid"),
        ({"a\n": {"parallelize": in_ddp}}, {}, "layout name 'a\\n'"),
        ({"a": 3}, {}, "layout 'a' is not valid: it is 3. Expected a dict"),
        (
            {"a": {"parallelize": in_ddp}},
            {"modle": 1},
            "'modle' in the matrix is not valid: there is no",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(layouts: Any, changes: dict[str, Any], names: str) -> None:
    """One line names layout, argument and reason before anything runs."""
    given = {
        name: {"mesh": {"dp": 2}} | options if isinstance(options, dict) else options for name, options in dict(layouts).items()
    }
    with pytest.raises(UsageError) as raised:
        equivcheck.Matrix(layouts=given or layouts, **shared(**changes))
    assert names in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_layout_that_does_not_exist_is_refused() -> None:
    """The text lists the layouts."""
    with pytest.raises(UsageError, match=r"layout 'c' .* Expected one of a, b"):
        matrix_of({name: {"parallelize": in_ddp} for name in ("a", "b")}).run("c")
