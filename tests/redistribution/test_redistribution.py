"""Every redistribution of a DTensor, in sim and over gloo, against the NumPy model: forward, and the gradient."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch.distributed.tensor import placement_types

from collectives.worlds import DEADLINE, WORLDS, run_in
from equivcheck.system.torch_version import is_torch_in
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import open_ranks
from equivcheck.worlds.sim import arithmetic
from redistribution.cases import Redistribution
from redistribution.differences import DIFFERENCES, Difference
from redistribution.drawn import batches
from redistribution.judge import assert_right, expected_of, first_wrong, same
from redistribution.programs import redistribute

EXAMPLES = max(4, settings().max_examples // 25)
"""Batches of up to twelve redistributions."""
BY_SIZE = {2: 1, 3: 1, 4: 4, 6: 3, 8: 1}
"""Times as many for a number of ranks: meshes of several axes have most to get wrong."""
GLOO_EXAMPLES = max(2, settings().max_examples // 30)
HERE = [difference for difference in DIFFERENCES if is_torch_in(difference.torch)]
WRONG_HERE = {difference.case for difference in HERE}
RIGHT_HERE = [case for case in dict.fromkeys(difference.case for difference in DIFFERENCES) if case not in WRONG_HERE]


def agree(world: str, size: int, examples: int, **options: Any) -> None:
    """Redistributions in a world of some ranks are right."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=(HealthCheck.too_slow,), **options)
    @given(batches(size))
    def right(cases: tuple[Redistribution, ...]) -> None:
        assert_right(cases, run_in(world, size, redistribute, cases))

    right()


@pytest.mark.parametrize("size", BY_SIZE)
def test_in_sim(size: int) -> None:
    """Every rank's part, and its gradient, are what arithmetic says, exactly."""
    agree("sim", size, BY_SIZE[size] * EXAMPLES)


@pytest.mark.parametrize("size", [3, 4])
def test_over_gloo(size: int) -> None:
    """Likewise of what is drawn for processes."""
    agree("gloo", size, GLOO_EXAMPLES)


@pytest.mark.parametrize("difference", HERE, ids=lambda difference: difference.name)
def test_differences(difference: Difference) -> None:
    """What torch gets wrong or refuses is so in both worlds, bit for bit; if not, torch mended it."""
    if difference.hangs:
        assert_hangs(difference.case)
    else:
        assert_differs(difference)


def assert_differs(difference: Difference) -> None:
    """Both worlds have the same results and errors, and what is wrong is."""
    case = difference.case
    by_world = [[values[0] for values in run_in(world, _size(case), redistribute, [case])] for world in WORLDS]
    for in_sim, over_gloo, coordinate in zip(*by_world, case.coordinates(), strict=True):
        assert re.search(difference.error or "^$", in_sim.error)
        assert re.search(difference.error or "^$", over_gloo.error)
        assert all(same(getattr(in_sim, name), getattr(over_gloo, name)) for name in expected_of(case, coordinate))
    if difference.wrong:
        assert re.match(rf"rank \d: {difference.wrong} is ", first_wrong(case, by_world[0], gradients=True))


def assert_hangs(case: Redistribution) -> None:
    """Some ranks wait for others in vain; over gloo some may raise instead."""
    with open_ranks("sim", _size(case)) as ranks, pytest.raises(RanksFailed, match="no rank can continue"):
        ranks.run(redistribute, [case], deadline=DEADLINE)
    with open_ranks("gloo", _size(case)) as ranks, contextlib.suppress(RanksFailed):
        assert any(values[0].error for values in ranks.run(redistribute, [case], deadline=1.0).values)


@pytest.mark.parametrize("case", RIGHT_HERE, ids=lambda case: str(case.mesh))
def test_differences_of_other_versions(case: Redistribution) -> None:
    """What another version of torch gets wrong is right, in both worlds."""
    for world in WORLDS:
        assert_right([case], run_in(world, _size(case), redistribute, [case]))


def _size(case: Redistribution) -> int:
    return len(list(case.coordinates()))


# Mistakes of the world, and of torch, that the property must find.


def _next_member(combine: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Members get what is the next one's."""

    def wrong(shares: Any) -> Any:
        found = combine(shares)
        return [*found[1:], found[0]]

    return wrong


def _parts_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor on CPU gathers where it exchanges parts on other devices, so sim's all_to_all is not reached."""
    right = arithmetic.all_gather_single
    monkeypatch.setattr(arithmetic, "all_gather_single", lambda shares: right([*shares[1:], shares[0]]))


def _reduction_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    right = arithmetic.reduce_scatter_single
    monkeypatch.setattr(arithmetic, "reduce_scatter_single", lambda op: _next_member(right(op)))


def _sum_for_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    right = arithmetic.fold
    monkeypatch.setattr(arithmetic, "fold", lambda op, tensors: right("sum" if op == "avg" else op, tensors))


def _padding_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpad(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        return tensor.narrow(dim, size, tensor.shape[dim] - size)

    monkeypatch.setattr(placement_types, "unpad_tensor", unpad)


def _rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.chunk

    def chunk(tensor: torch.Tensor, count: int, dim: int = 0) -> Sequence[torch.Tensor]:
        size = tensor.shape[dim] // count
        sizes = [size] * (count - 1) + [tensor.shape[dim] - size * (count - 1)]
        return tensor.split(sizes, dim) if size else right(tensor, count, dim)

    monkeypatch.setattr(torch, "chunk", chunk)


PLANTED = (_parts_of_the_next, _reduction_of_the_next, _sum_for_mean, _padding_first, _rounded_down)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_planted_mistakes_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The property fails where a part is another rank's, a mean is a sum, or an uneven part is off by one."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, RanksFailed)):
        agree("sim", 4, 20 * EXAMPLES, phases=(Phase.generate,), database=None, report_multiple_bugs=False)
