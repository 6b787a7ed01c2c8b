"""Nobody looks for the cause of a wrong training here, but in tests that ask for `with_causes`: it takes half of their time."""

from __future__ import annotations

import pytest


@pytest.fixture
def with_causes() -> None:
    """Verdicts name causes and modules, as they do for users."""


@pytest.fixture
def without_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts are as they are before a cause is looked for."""
    monkeypatch.setattr("equivcheck.user.diagnosis.told.with_cause", lambda verdict, *_: verdict)


@pytest.fixture(autouse=True)
def _causes_only_if_asked_for(request: pytest.FixtureRequest) -> None:
    if "with_causes" not in request.fixturenames:
        request.getfixturevalue("without_causes")
