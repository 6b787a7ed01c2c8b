"""Ranks that disagree although the first one is right."""

from equivcheck import check
from equivcheck.diagnosis.explain import explained
from equivcheck.mutants.registry import mutant
from equivcheck.oracle.verdict.cause import Cause
from mutants.minimums import MINIMUMS


def test_a_second_rank_that_is_not_updated_disagrees() -> None:
    """Neither unchanged rows nor a ratio explains it, because the first rank's values are right."""
    skips = mutant("rank_skips_update")

    verdict = explained(check(MINIMUMS[skips.name], alter=skips.plant), alter=skips.plant)

    assert verdict.diagnosis is not None
    assert verdict.diagnosis.cause is Cause.RANKS_DISAGREE
    assert verdict.diagnosis.cause in skips.causes
