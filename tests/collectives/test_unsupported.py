"""What a world does not take raises on every rank: no wrong numbers, no hang, and the next call works."""

from __future__ import annotations

import re

import numpy as np
import pytest

from collectives.cases import Case, Kind
from collectives.judge import assert_received
from collectives.post_programs import run_coalesced
from collectives.programs import extreme_of_nan, run_batch
from collectives.unsupported import BOTH, FUNCTIONAL_COMPLEX_GATHER, GROUP, REFUSALS, STUCK, Refusal
from collectives.worlds import run_in
from equivcheck.worlds.failure import FailureKind, RanksFailed
from equivcheck.worlds.pool import open_ranks

PLAIN = Case(kind=Kind.ALL_REDUCE, group=GROUP, shape=(2,), op="sum")


@pytest.mark.parametrize("world", BOTH)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_what_is_refused_raises_on_every_rank(refusal: Refusal, world: str) -> None:
    """Each call of the table raises and says why; in a world that the table does not name it agrees with the model."""
    cases = [*refusal.cases(), PLAIN]
    *refused, plain = zip(*run_in(world, len(GROUP), run_batch, cases, False), strict=True)
    assert_received(PLAIN, plain)
    for case, results in zip(cases[:-1], refused, strict=True):
        if world not in refusal.worlds:
            assert_received(case, results)
            continue
        for result in results:
            assert re.match("RuntimeError|ValueError|CallRefused", result.error), f"{result} in {case}"
            assert re.search(refusal.text, result.error), f"{result} in {case}"


@pytest.mark.parametrize(("world", "kind"), [("sim", FailureKind.DEADLOCK), ("gloo", FailureKind.TIMEOUT)])
@pytest.mark.parametrize("case", STUCK, ids=lambda case: case.kind.value)
def test_what_leaves_others_waiting_is_reported(case: Case, world: str, kind: FailureKind) -> None:
    """Parts of different sizes are a failure of the world, which works afterwards."""
    with open_ranks(world, len(GROUP)) as ranks:
        with pytest.raises(RanksFailed) as caught:
            ranks.run(run_batch, [case], False, deadline=1.0)
        assert caught.value.failure.kind is kind
        assert_received(PLAIN, [values[0] for values in ranks.run(run_batch, [PLAIN], False).values])


def test_a_functional_gather_of_complex_numbers_raises_over_gloo() -> None:
    """On every rank; in sim it works."""
    by_world = {world: run_in(world, len(GROUP), run_coalesced, [FUNCTIONAL_COMPLEX_GATHER]) for world in BOTH}
    assert_received(FUNCTIONAL_COMPLEX_GATHER.cases[0], [values[0][0] for values in by_world["sim"]])
    assert all("Invalid scalar type" in values[0][0].error for values in by_world["gloo"])


@pytest.mark.parametrize("op", ["min", "max"])
def test_extrema_over_gloo_lose_nan(op: str) -> None:
    """Gloo compares with `<`: whether NaN or the number is kept depends on which rank holds which element; sim keeps NaN.

    No scenario meets this, as a reference with NaN is in doubt.
    """
    for found in run_in("gloo", len(GROUP), extreme_of_nan, op):
        assert 0 < np.isnan(found).sum() < len(found)
