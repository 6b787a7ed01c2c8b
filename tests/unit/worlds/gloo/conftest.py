"""Two gloo ranks shared by all tests here: starting the fork server costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from equivcheck.worlds.gloo.world import GlooRanks


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[GlooRanks]:
    """Open for the whole session, so that the fork server stays."""
    with GlooRanks(2) as ranks:
        yield ranks


@pytest.fixture
def ranks(shared_ranks: GlooRanks) -> GlooRanks:
    """Two ranks that can be used."""
    return shared_ranks
