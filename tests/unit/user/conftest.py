"""Skip the search for causes, which takes half the time, in tests without the fixture `with_causes`."""

from __future__ import annotations

import pytest


@pytest.fixture
def with_causes() -> None:
    """Let verdicts name causes and modules."""


@pytest.fixture
def without_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verdicts skip the search for a cause."""
    monkeypatch.setattr("equivcheck.user.judging.with_cause", lambda verdict, *_: verdict)


@pytest.fixture(autouse=True)
def _causes_only_if_asked_for(request: pytest.FixtureRequest) -> None:
    if "with_causes" not in request.fixturenames:
        request.getfixturevalue("without_causes")
