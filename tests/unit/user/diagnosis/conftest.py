"""Tests in this folder search for causes and modules."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def with_causes() -> None:
    """Let verdicts name causes and modules."""
