"""Check whether a parallel training computes the same as one device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equivcheck.batching.batching import Batching
    from equivcheck.batching.check import check_batching
    from equivcheck.batching.verdict import BatchingVerdict
    from equivcheck.checking.check import check
    from equivcheck.diagnosis.explain import explained
    from equivcheck.errors import EquivCheckError, InvalidScenario, NotEquivalent, UsageError
    from equivcheck.oracle.verdict.verdict import Outcome, Verdict
    from equivcheck.programs.nouns import TensorProgram
    from equivcheck.programs.operation_check.check import check_operation
    from equivcheck.recording.compare.compare import compare
    from equivcheck.recording.compare.verdict import TraceVerdict
    from equivcheck.recording.watch.record import record
    from equivcheck.scenario import Layout, Scenario, Training
    from equivcheck.scenario.file_format.codec import from_json, to_json
    from equivcheck.user.batch_splits.smallest import smallest
    from equivcheck.user.batch_splits.splits import BatchSplits
    from equivcheck.user.check import check_training
    from equivcheck.user.matrix.matrix import Matrix, matrix
    from equivcheck.user.optimizer_check.check import check_optimizer
    from equivcheck.user.optimizer_check.result import OptimizerVerdict
    from equivcheck.user.resuming.restart import Restart
    from equivcheck.user.trainers.model import TrainerModel
    from equivcheck.user.trainers.protocol import LocalPart, Trainer
    from equivcheck.worlds.world import World

__version__ = "0.1.0"

_HOMES = {
    "equivcheck.batching.batching": ("Batching",),
    "equivcheck.batching.check": ("check_batching",),
    "equivcheck.batching.verdict": ("BatchingVerdict",),
    "equivcheck.checking.check": ("check",),
    "equivcheck.diagnosis.explain": ("explained",),
    "equivcheck.errors": ("EquivCheckError", "InvalidScenario", "NotEquivalent", "UsageError"),
    "equivcheck.oracle.verdict.verdict": ("Outcome", "Verdict"),
    "equivcheck.programs.nouns": ("TensorProgram",),
    "equivcheck.programs.operation_check.check": ("check_operation",),
    "equivcheck.recording.compare.compare": ("compare",),
    "equivcheck.recording.compare.verdict": ("TraceVerdict",),
    "equivcheck.recording.watch.record": ("record",),
    "equivcheck.scenario": ("Layout", "Scenario", "Training"),
    "equivcheck.scenario.file_format.codec": ("from_json", "to_json"),
    "equivcheck.user.check": ("check_training",),
    "equivcheck.user.matrix.matrix": ("Matrix", "matrix"),
    "equivcheck.user.optimizer_check.check": ("check_optimizer",),
    "equivcheck.user.optimizer_check.result": ("OptimizerVerdict",),
    "equivcheck.user.resuming.restart": ("Restart",),
    "equivcheck.user.batch_splits.smallest": ("smallest",),
    "equivcheck.user.batch_splits.splits": ("BatchSplits",),
    "equivcheck.user.trainers.model": ("TrainerModel",),
    "equivcheck.user.trainers.protocol": ("LocalPart", "Trainer"),
    "equivcheck.worlds.world": ("World",),
}

__all__ = [
    "BatchSplits",
    "Batching",
    "BatchingVerdict",
    "EquivCheckError",
    "InvalidScenario",
    "Layout",
    "LocalPart",
    "Matrix",
    "NotEquivalent",
    "OptimizerVerdict",
    "Outcome",
    "Restart",
    "Scenario",
    "TensorProgram",
    "TraceVerdict",
    "Trainer",
    "TrainerModel",
    "Training",
    "UsageError",
    "Verdict",
    "World",
    "check",
    "check_batching",
    "check_operation",
    "check_optimizer",
    "check_training",
    "compare",
    "explained",
    "from_json",
    "matrix",
    "record",
    "smallest",
    "to_json",
]


def __getattr__(name: str) -> Any:
    """Import a public name at first use (PEP 562), so that `import equivcheck` is fast and does not import torch."""
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
