"""Two gloo ranks shared by all tests here, because starting the fork server takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from equivcheck.worlds.gloo.world import GlooRanks


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[GlooRanks]:
    """Ranks that stay open for the session, to keep the fork server."""
    with GlooRanks(2) as ranks:
        yield ranks


@pytest.fixture
def ranks(shared_ranks: GlooRanks) -> GlooRanks:
    """Two usable ranks."""
    return shared_ranks
