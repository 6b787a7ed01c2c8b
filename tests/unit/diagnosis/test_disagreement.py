"""Ranks that disagree although the first one is right."""

from equivcheck import check
from equivcheck.diagnosis.explain import explained
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.cause import Cause
from mutants.minimums import MINIMUMS


def test_a_rank_that_is_not_updated_is_named() -> None:
    """The first rank's values are right, so only a run per rank shows it."""
    skips = mutant("rank_skips_update")

    verdict = explained(check(MINIMUMS[skips.name], alter=skips.plant), alter=skips.plant)

    assert verdict.diagnosis is not None
    assert verdict.diagnosis.cause is Cause.NOT_UPDATED
    assert verdict.diagnosis.sentence == "the optimizer does not update any parameter on rank 1"
