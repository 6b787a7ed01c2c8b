"""Notes in verdicts about element types, with the argument that accounts for them."""

from __future__ import annotations

from dataclasses import fields

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.scenario import LowPrecision, MixedPrecision
from equivcheck.user.precision.narrowed import where_narrowed
from equivcheck.user.precision.policy import Precision
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.user.task import Task
from equivcheck.user.traces.settings import UserTrace

KEPT = "keep_dtype: every cast to float32 was replaced by float64, on one device and on all ranks"
"""Note on a training under `keep_dtype`."""


def on_narrowing(run: SingleDeviceRun) -> tuple[str, ...]:
    """Name the modules that compute in a narrower type than the training, and how to prevent it."""
    kept = (KEPT,) if run.task.keep_dtype else ()
    found = where_narrowed(run) if run.task.precision is None else ()
    if not found:
        return kept
    wide, narrow = (str(kind).removeprefix("torch.") for kind in (run.task.dtype, run.precision))
    more = f", and {len(found) - 1} more" if found[1:] else ""
    way = "" if kept or wide != "float64" else ". With keep_dtype=True it stays float64, and smaller errors show"
    return *kept, f"{wide} becomes {narrow} in {found[0]}{more}, so tolerances are those of {narrow}{way}"


def on_precision(task: Task, traces: tuple[UserTrace, ...], outcome: Outcome) -> tuple[str, ...]:
    """Name the `precision` that ranks use if the verdict is not EQUIVALENT under another one."""
    seen = next((trace.low_precision for trace in traces if trace.low_precision is not None), None)
    if outcome not in (Outcome.DIVERGED, Outcome.INCONCLUSIVE) or seen is None or _agree(seen, task.precision):
        return ()
    if task.precision is not None:
        return (f"precision is {task.precision!r}, but your ranks use {seen!r}",)
    also = " and dtype=torch.float32" if isinstance(seen, LowPrecision) else ""
    return (
        f"your ranks round to fewer digits than one device: try precision={seen!r}{also}, so that both round in the same way",
    )


def _agree(seen: Precision, given: Precision | None) -> bool:
    """Whether nothing that was seen contradicts the given precision. Unseen fields may have any value."""
    if isinstance(seen, LowPrecision) or not isinstance(given, MixedPrecision):
        return seen == given
    return all(getattr(seen, field.name) in (None, getattr(given, field.name)) for field in fields(seen))
