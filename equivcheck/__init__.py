"""Check whether a parallel training computes the same as one device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equivcheck.checking.check import check
    from equivcheck.diagnosis.explain import explained
    from equivcheck.errors import EquivCheckError, InvalidScenario, NotEquivalent, UsageError
    from equivcheck.oracle.verdict.verdict import Outcome, Verdict
    from equivcheck.programs.nouns import TensorProgram
    from equivcheck.programs.operation_check.check import check_operation
    from equivcheck.scenario import Layout, Scenario, Training
    from equivcheck.scenario.file_format.codec import from_json, to_json
    from equivcheck.user.check import check_training
    from equivcheck.user.matrix.matrix import Matrix, matrix
    from equivcheck.user.smallest import smallest
    from equivcheck.worlds.world import World

__version__ = "0.1.0"

_HOMES = {
    "EquivCheckError": "equivcheck.errors",
    "InvalidScenario": "equivcheck.errors",
    "Layout": "equivcheck.scenario",
    "Matrix": "equivcheck.user.matrix.matrix",
    "NotEquivalent": "equivcheck.errors",
    "Outcome": "equivcheck.oracle.verdict.verdict",
    "Scenario": "equivcheck.scenario",
    "TensorProgram": "equivcheck.programs.nouns",
    "Training": "equivcheck.scenario",
    "UsageError": "equivcheck.errors",
    "Verdict": "equivcheck.oracle.verdict.verdict",
    "World": "equivcheck.worlds.world",
    "check": "equivcheck.checking.check",
    "check_operation": "equivcheck.programs.operation_check.check",
    "check_training": "equivcheck.user.check",
    "explained": "equivcheck.diagnosis.explain",
    "from_json": "equivcheck.scenario.file_format.codec",
    "matrix": "equivcheck.user.matrix.matrix",
    "smallest": "equivcheck.user.smallest",
    "to_json": "equivcheck.scenario.file_format.codec",
}

__all__ = [
    "EquivCheckError",
    "InvalidScenario",
    "Layout",
    "Matrix",
    "NotEquivalent",
    "Outcome",
    "Scenario",
    "TensorProgram",
    "Training",
    "UsageError",
    "Verdict",
    "World",
    "check",
    "check_operation",
    "check_training",
    "explained",
    "from_json",
    "matrix",
    "smallest",
    "to_json",
]


def __getattr__(name: str) -> Any:
    """Import a public name at first use (PEP 562), so that `import equivcheck` is fast and does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
