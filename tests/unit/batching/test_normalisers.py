"""Normalisers: how each of them reads in a verdict."""

from __future__ import annotations

from equivcheck.batching.normalisers import candidates


def test_every_normaliser_reads_as_one_phrase() -> None:
    """No phrase has an empty clause, and no two normalisers of tokens have the same phrase."""
    words = [each.words(is_sum=is_sum) for each in candidates(4, has_ranks=True) for is_sum in (True, False)]
    assert not [phrase for phrase in words if ",," in phrase or "  " in phrase or " ," in phrase]
    of_tokens = [str(each) for each in candidates(4, has_ranks=True)]
    assert len(set(of_tokens)) == len(of_tokens)
