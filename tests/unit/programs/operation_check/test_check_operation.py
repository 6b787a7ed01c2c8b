"""Tests for `check_operation`: right and wrong rules, `local_map` and derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from equivcheck import NotEquivalent, UsageError, check_operation
from equivcheck.programs.operation_check.result import OperationResult
from equivcheck.worlds.trace.differences import Phase
from unit.programs.operation_check.operations import (
    LocalSum,
    ScaledSum,
    centered,
    less_its_mean,
    refused_by_the_first,
    register_any_dim,
    register_rows_only,
    weighted,
    weighted_on,
)

X = torch.arange(12.0).reshape(4, 3).sin()
WEIGHT = torch.tensor([1.0, 2.0, 3.0])


def outcomes(found: OperationResult) -> dict[str, str]:
    """Outcome by placement of the first input."""
    return {" ".join(row.placements[0] or ("plain",)): row.outcome_name for row in found.rows}


def test_an_operation_that_torch_has_right_is_equivalent_under_all_placements() -> None:
    """Including partial ones, with two inputs and their gradients."""
    found = check_operation(torch.mm, [X, X.t()])
    assert len(found.rows) == 16
    found.assert_equivalent(refused=False)


def test_a_rule_that_is_right_passes() -> None:
    """DTensor redistributes placements that the rule does not list."""
    found = check_operation(centered, [X], setup=register_rows_only)
    assert outcomes(found) == dict.fromkeys(("R", "S(0)", "S(1)", "P(sum)"), "equivalent")
    assert [row.outputs for row in found.rows] == [("R",), ("S(0)",), ("R",), ("P(sum)",)]


def test_a_rule_that_is_wrong_is_told_by_the_placement() -> None:
    """Values differ only if the last dim is sharded."""
    found = check_operation(centered, [X], setup=register_any_dim)
    assert outcomes(found) == {"R": "equivalent", "S(0)": "equivalent", "S(1)": "diverged", "P(sum)": "equivalent"}
    (wrong,) = found.wrong
    assert wrong.divergence is not None
    assert wrong.divergence.phase is Phase.VALUE
    with pytest.raises(NotEquivalent, match=r"S\(1\) +diverged +S\(1\)"):
        found.assert_equivalent()


@pytest.mark.slow
def test_rules_end_with_their_check() -> None:
    """A right rule after a wrong one is right. Without either, every process refuses the operation."""
    for world in ("sim", "gloo"):
        check_operation(less_its_mean, [X], placements=["S(1)"], setup=register_any_dim, world=world)
        check_operation(less_its_mean, [X], placements=["S(1)"], setup=register_rows_only, world=world).assert_equivalent()
        found = check_operation(less_its_mean, [X], world=world)
        assert set(outcomes(found).values()) == {"refused"}
        assert "does not have a sharding strategy registered" in found.refused[0].reason


def test_a_rule_of_torch_is_back_after_a_check() -> None:
    """If a check has replaced it."""

    def replaced() -> None:
        from torch.distributed.tensor.experimental import register_sharding

        @register_sharding(torch.ops.aten.cumsum.default)
        def rule(x: Any, _dim: int) -> Any:
            return [([Shard(dim)], [Shard(dim), None]) for dim in range(x.ndim)]

    wrong = check_operation(torch.cumsum, [X, 0], setup=replaced, gradients=False)
    assert outcomes(wrong)["S(0)"] == "diverged"
    check_operation(torch.cumsum, [X, 0], gradients=False).assert_equivalent(refused=False)


def test_local_map_that_names_the_gradients_placements_passes() -> None:
    """If inputs have its placements; it refuses all others."""
    found = check_operation(weighted, [X, WEIGHT], on_ranks=weighted_on(True))
    assert {row.placements for row in found.equivalent} == {(("S(0)",), ("R",))}
    assert len(found.refused) == len(found.rows) - 1
    found.assert_equivalent()
    with pytest.raises(NotEquivalent):
        found.assert_equivalent(refused=False)


def test_local_map_without_them_has_a_wrong_gradient() -> None:
    """Each rank has the weight's gradient for its own rows only."""
    found = check_operation(weighted, [X, WEIGHT], placements=[(Shard(0), Replicate())], on_ranks=weighted_on(False))
    (wrong,) = found.wrong
    assert wrong.divergence is not None
    assert (wrong.divergence.phase, wrong.divergence.tensor) == (Phase.GRADIENT, "weight")


def test_without_gradients_only_values_count() -> None:
    """With `gradients=False`, this `local_map` passes."""
    placements = [(Shard(0), Replicate())]
    check_operation(
        weighted, [X, WEIGHT], placements=placements, on_ranks=weighted_on(False), gradients=False
    ).assert_equivalent()


def test_an_autograd_function_on_dtensors() -> None:
    """DTensor operations in forward and backward are right. Using the local tensor as the full one is wrong if it is sharded."""
    check_operation(ScaledSum.apply, [X], mesh={"dp": 2, "tp": 2}).assert_equivalent(refused=False)
    wrong = check_operation(LocalSum.apply, [X])
    assert outcomes(wrong)["R"] == "equivalent"
    assert {outcomes(wrong)["S(0)"], outcomes(wrong)["S(1)"]} == {"diverged"}


@pytest.mark.parametrize("world", ["sim", pytest.param("gloo", marks=pytest.mark.slow)])
def test_what_only_some_ranks_refuse_has_crashed(world: str) -> None:
    """Although the others wait, the error is from the rank that refused."""
    found = check_operation(refused_by_the_first, [X], placements=["R", "S(0)"], world=world, deadline=3)
    assert outcomes(found) == {"R": "equivalent", "S(0)": "crashed"}
    assert "shards are not supported on this rank" in found.wrong[0].reason


def test_an_error_that_does_not_say_what_is_unsupported_has_crashed() -> None:
    """Unless the user names it."""

    def strict(x: Any) -> Any:
        if isinstance(x, DTensor) and not x.placements[0].is_replicate():
            raise ValueError("give it whole")
        return x * 2

    assert outcomes(check_operation(strict, [X], placements=["R", "S(0)"]))["S(0)"] == "crashed"
    named = check_operation(strict, [X], placements=["R", "S(0)"], refuses="give it whole")
    assert outcomes(named) == {"R": "equivalent", "S(0)": "refused"}


def test_integers_numbers_and_several_results() -> None:
    """Indices have no gradient and are never partial; results other than tensors are compared too."""

    def looked_up(indices: Any, table: Any, scale: float) -> dict[str, Any]:
        rows = torch.nn.functional.embedding(indices, table) * scale
        return {"rows": rows, "largest": (rows.amax(-1), rows.numel())}

    indices = torch.tensor([[0, 3, 1], [2, 2, 0]])
    found = check_operation(
        looked_up, [indices, torch.arange(8.0).reshape(4, 2).cos(), 0.5], placements=[("S(0)", "R"), ("R", "R")]
    )
    found.assert_equivalent()
    assert found.inputs == ("indices", "table")
    assert [len(row.outputs) for row in found.rows] == [3, 3]


def test_an_input_that_is_written_to_is_compared_afterwards() -> None:
    """Without gradients, writes to inputs are part of the result."""

    def halved_rows(x: Any) -> None:
        (x.to_local() if isinstance(x, DTensor) else x)[:2].mul_(0.5)

    found = check_operation(halved_rows, [X], gradients=False, placements=["R", "S(0)"])
    assert outcomes(found) == {"R": "equivalent", "S(0)": "diverged"}


def test_inputs_may_be_drawn_for_several_seeds() -> None:
    """Each row names its seed."""
    found = check_operation(torch.exp, lambda chance: [torch.randn(3, 2, generator=chance)], placements=["S(1)"], seeds=(1, 2))
    assert [row.seed for row in found.rows] == [1, 2]
    assert "seed" in found.describe()
    found.assert_equivalent()


def test_single_precision_has_tolerances_of_its_own() -> None:
    """Another summation order over 64 elements is no difference."""
    chance = torch.Generator().manual_seed(0)
    inputs = [torch.randn(8, 64, generator=chance), torch.randn(64, 8, generator=chance)]
    check_operation(torch.mm, inputs, placements=[(Shard(1), Shard(0)), ("P(sum)", "R")], dtype=None).assert_equivalent()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"placements": ["S(2)"]}, r"placements of x: .*Expected a dim below"),
        ({"placements": [("R", "R")]}, "Expected a list of length 1, for x"),
        ({"placements": ["Q"]}, "Expected R, S"),
        ({"placements": [_ := Partial("product")]}, "Expected R, S"),
        ({"mesh": {"dp": 0}}, "at least 1"),
        ({"mesh": {"dp": 2, "tp": 2}, "placements": ["R"]}, "each mesh axis needs a placement. Expected a list of length 2"),
        ({"world": "fake"}, "it computes no values"),
        ({"world": "nowhere"}, "does not exist"),
        ({"dtype": torch.int64}, "floating-point"),
        ({"reductions": ("product",)}, "Expected any of sum, avg"),
        ({"seeds": ()}, "at least one"),
        ({"setup": 3}, "a callable"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(given: dict[str, Any], text: str) -> None:
    """In one line with the expected form."""

    def double(x: Any) -> Any:
        return x * 2

    with pytest.raises(UsageError, match=text) as refused:
        check_operation(double, [X], **given)
    assert "\n" not in str(refused.value)


def test_what_has_no_derivative_is_refused_with_gradients() -> None:
    """The text says how to go on."""
    with pytest.raises(UsageError, match="gradients=False"):
        check_operation(torch.argsort, [X])
    check_operation(torch.argsort, [X], gradients=False).assert_equivalent()


def test_an_operation_that_computes_in_float32_is_compared_as_that_rounds() -> None:
    """Ranks that add up parts round differently, although the result has another dtype."""
    found = check_operation(lambda numbers: numbers.float().exp().sum().double(), [X])
    found.assert_equivalent()
    assert outcomes(found)["S(0)"] == "equivalent"
