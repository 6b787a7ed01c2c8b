"""Skip the search for causes, which takes half the time, in tests without the fixture `with_causes`."""

from __future__ import annotations

import pytest

from equivcheck.user.lazy_diagnosis import UserDiagnosis


@pytest.fixture
def with_causes() -> None:
    """Let verdicts name causes and modules."""


@pytest.fixture
def without_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verdicts skip the search for a cause."""
    monkeypatch.setattr("equivcheck.user.diagnosing.diagnosis_of", lambda hint, *_: UserDiagnosis(hint=hint))


@pytest.fixture(autouse=True)
def _causes_only_if_asked_for(request: pytest.FixtureRequest) -> None:
    if "with_causes" not in request.fixturenames:
        request.getfixturevalue("without_causes")


@pytest.fixture(autouse=True)
def _no_diagnosis_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equivcheck.user.diagnosing._last", [])
