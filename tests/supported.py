"""Scenarios that the installed torch cannot run."""

from __future__ import annotations

import pytest


def require_supported(reason: str) -> None:
    """Skip a test whose scenario is unsupported by a limit that only some versions of torch have, as the reason says."""
    if "(torch " in reason:
        pytest.skip(reason)
