"""Causes and modules are what is tested here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def with_causes() -> None:
    """Verdicts name causes and modules, as they do for users."""
