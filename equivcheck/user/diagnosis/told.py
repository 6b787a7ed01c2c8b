"""Add the diagnosis to a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from equivcheck.oracle.reference.reference import Reference
from equivcheck.oracle.verdict.description import failed
from equivcheck.user.diagnosis.diverged import diverged_training
from equivcheck.user.diagnosis.explain import explanation_of
from equivcheck.user.diagnosis.typed import opinion_of_types
from equivcheck.user.diagnosis.where import where_of
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.user.task import Task
from equivcheck.user.verdict import UserVerdict


def with_types(verdict: UserVerdict, task: Task) -> UserVerdict:
    """Add the type checker's result."""
    return replace(verdict, types=opinion_of_types(task))


def with_cause(verdict: UserVerdict, run: SingleDeviceRun, reference: Reference, traces: Sequence[Any]) -> UserVerdict:
    """Add cause or pattern, and the first wrong module. An exception on the way becomes a note."""
    verdict = with_types(verdict, run.task)
    try:
        diverged = diverged_training(run.task, reference, run.trace, traces, run.eps)
        if diverged is None:
            return verdict
        found, where = explanation_of(diverged), where_of(diverged)
    except Exception as error:
        return replace(verdict, notes=(*verdict.notes, failed("looking for the cause", error)))
    hint = "" if found.cause else "; ".join(filter(None, (verdict.hint, found.pattern)))
    return replace(verdict, cause=found.cause, kinds=found.kinds, where=where, hint=hint)
