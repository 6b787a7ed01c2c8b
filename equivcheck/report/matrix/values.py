"""Layout matrix as JSON values."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from equivcheck.user.matrix.result import MatrixResult
from equivcheck.user.matrix.row import Row


def matrix_object(found: MatrixResult) -> dict[str, Any]:
    """One object with a row per layout."""
    return {
        "layouts": [_row(row) for row in found.rows],
        "asked": found.asked,
        "passed": found.is_passed,
        "interrupted": found.interrupted,
    }


def _row(row: Row) -> dict[str, Any]:
    divergence = None if row.verdict is None else row.verdict.divergence
    return {
        "name": row.name,
        "mesh": dict(row.mesh),
        "world": None if row.verdict is None else row.verdict.world,
        "outcome": None if row.verdict is None else row.verdict.outcome.value,
        "expected": row.expected.value,
        "as_expected": row.is_as_expected,
        "first_difference": row.first_difference or None,
        "step": None if divergence is None else divergence.step,
        "phase": None if divergence is None else divergence.phase.value,
        "tensor": None if divergence is None else divergence.tensor,
        "cause": row.cause or None,
        "details": row.details,
        "error": row.error or None,
        **_measures(row),
        "milliseconds": round(row.milliseconds, 2),
    }


def _measures(row: Row) -> dict[str, Any]:
    names = ("loss", "expected_loss", "gradient_norm", "expected_gradient_norm", "num_calls", "num_bytes")
    found = dict.fromkeys(names) if row.measures is None else asdict(row.measures)
    ratio = None if row.measures is None else row.measures.norm_ratio
    return {name: _number(value) for name, value in (found | {"norm_ratio": ratio}).items()}


def _number(value: float | None) -> float | str | None:
    """Infinity and NaN as text, because JSON lacks them."""
    return value if value is None or math.isfinite(value) else str(value)
