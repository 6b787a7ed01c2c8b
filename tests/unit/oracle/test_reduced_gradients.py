"""Tests for accumulating and averaging gradients, as both emulators for data parallelism do."""

from typing import Any

import pytest
import torch

from equivcheck.layouts.base.rounding import Division, WhenReduced
from equivcheck.oracle.reference.reduction import AccumulatedGradients, Averaging, Gradients


def parts(*values: float, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """One element per rank."""
    return [torch.tensor([value], dtype=dtype) for value in values]


def mean_of(values: list[torch.Tensor], division: Division, **options: Any) -> torch.Tensor:
    """The mean, or the sum divided by another divisor."""
    return Averaging(division=division, **options).mean(values)


def mean_of_all(gradients: list[Gradients], _last: bool) -> list[Gradients]:
    """Give each rank the mean."""
    mean = torch.stack([each["a"] for each in gradients]).mean(0)
    return [{"a": mean} for _ in gradients]


@pytest.mark.parametrize("division", list(Division))
@pytest.mark.parametrize("shards", [None, 2, 3])
def test_every_division_gives_the_mean(division: Division, shards: int | None) -> None:
    """One stage or two, and any point of division, give the mean."""
    assert mean_of(parts(1, 2, 3, 4, 5, 9), division, divisor=6, shards=shards).item() == pytest.approx(4.0)


@pytest.mark.parametrize("division", list(Division))
@pytest.mark.parametrize("shards", [None, 2, 3])
def test_every_division_is_by_the_divisor(division: Division, shards: int | None) -> None:
    """The sum is divided by the divisor, not by the number of parts."""
    assert mean_of(parts(1, 2, 3, 4, 5, 9), division, divisor=2.5, shards=shards).item() == pytest.approx(9.6)


@pytest.mark.parametrize("division", list(Division))
def test_ranks_without_a_gradient_count_as_zero(division: Division) -> None:
    """Two of three ranks have a gradient."""
    assert mean_of(parts(1, 5), division, divisor=3).item() == pytest.approx(2.0)


def test_when_a_sum_is_divided_shows_in_a_low_precision() -> None:
    """Twice 60000 overflows float16, unless each is divided before."""
    large = parts(60000, 60000, dtype=torch.float16)

    assert mean_of(large, Division.BEFORE, divisor=2).item() == 60000
    assert mean_of(large, Division.AFTER, divisor=2).isinf()


def test_sums_over_shards_are_averages_where_the_rest_of_the_divisor_comes_after() -> None:
    """Four times 30000 overflows float16, unless pairs are averaged before the sums are added."""
    large = parts(*(30000,) * 4, dtype=torch.float16)

    assert mean_of(large, Division.AFTER, divisor=2, shards=2).item() == 60000
    assert mean_of(large, Division.LAST, divisor=2, shards=2).isinf()


def test_an_order_is_asked_for_at_each_stage() -> None:
    """Two shard groups, then the sums."""
    asked: list[int] = []

    def ordered(values: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(len(values))
        return values[::-1]

    mean_of(parts(1, 2, 3, 4), Division.BEFORE, divisor=4, shards=2, ordered=ordered)

    assert asked == [2, 2, 2]


@pytest.mark.parametrize(("once", "whole"), [(False, False), (False, True), (True, False), (True, True)])
def test_microbatches_are_averaged_whenever_they_are_reduced(*, once: bool, whole: bool) -> None:
    """Reducing often or once gives the same, also on top of earlier gradients."""
    before: list[Gradients] = [{"a": torch.tensor([10.0])}] * 2
    gradients = AccumulatedGradients(before, mean_of_all, when=WhenReduced(once=once, whole=whole))
    for number, values in enumerate([(1.0, 3.0), (5.0, 7.0)]):
        for rank, value in enumerate(values):
            gradients.add(rank, {"a": torch.tensor([value])})
        gradients.end_microbatch(last=number == 1)

    assert [each["a"].item() for each in gradients.reduced] == [18.0, 18.0]


@pytest.mark.parametrize(("once", "whole", "times"), [(False, False, 2), (False, True, 2), (True, True, 1)])
def test_how_often_and_of_what_gradients_are_reduced(*, once: bool, whole: bool, times: int) -> None:
    """If means are replaced by sums, a gradient that is reduced twice counts twice: with full gradients, the first microbatch."""
    seen: list[float] = []

    def summed(gradients: list[Gradients], _last: bool) -> list[Gradients]:
        total = torch.stack([each["a"] for each in gradients]).sum(0)
        seen.append(total.item())
        return [{"a": total} for _ in gradients]

    gradients = AccumulatedGradients([{}, {}], summed, when=WhenReduced(once=once, whole=whole))
    for last in (False, True):
        for rank in range(2):
            gradients.add(rank, {"a": torch.tensor([1.0])})
        gradients.end_microbatch(last=last)

    assert len(seen) == times
    assert gradients.reduced[0]["a"].item() == (6.0 if whole and not once else 4.0)


def test_what_waits_keeps_its_element_type() -> None:
    """The first waiting gradient is rounded, and so is each sum with it."""
    gradients = AccumulatedGradients(
        [{}], lambda waiting, _last: waiting, when=WhenReduced(once=True), waits_as=lambda gradient: gradient.bfloat16()
    )
    for value, last in ((1.0, False), (1 / 512, True)):
        gradients.add(0, {"a": torch.tensor([value])})
        gradients.end_microbatch(last=last)

    assert gradients.reduced[0]["a"].dtype is torch.bfloat16
    assert gradients.reduced[0]["a"].item() == 1.0
