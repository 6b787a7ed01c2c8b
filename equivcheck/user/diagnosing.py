"""Diagnose a verdict of `check_training`, from the values of its run or of a second one."""

from __future__ import annotations

import copy
import hashlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from equivcheck.layouts.composition.running import RanksResult
from equivcheck.oracle.reference.reference import Reference
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.oracle.verdict.description import failure_line
from equivcheck.user.batches import map_tensors
from equivcheck.user.lazy_diagnosis import UserDiagnosis
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.user.task import Task
from equivcheck.user.traces.settings import UserTrace
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.state.keeper import ENTRIES, StateKeeper, changes, preserved_state, read
from equivcheck.worlds.trace.differences import Divergence
from equivcheck.worlds.trace.moments import moments

MOST_BYTES = 256 * 1024**2
"""Maximum bytes for the values of unread verdicts. The newest verdict's values are always kept."""
NO_MEAN = "your loss, or a layer such as batch norm, is not a mean over rows"
"""Start of a hint that holds for many correct trainings. Any other explanation replaces such a hint."""
OTHER_VALUES = "no cause was searched: your training gave other values when it ran again"
"""Message if a second check of the same training gives other values than the first."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Values:
    """Recorded values of one check, kept for a later diagnosis."""

    reference: Reference
    """Values from the single-device run, with tolerances."""
    single: UserTrace
    """Trace of the single-device run."""
    traces: tuple[UserTrace, ...]
    """Each rank's trace."""
    eps: float
    """Machine epsilon of the coarsest element type in the training."""

    @property
    def num_bytes(self) -> int:
        """Memory for these values, in bytes."""
        arrays = [moment.snapshot.values for trace in (self.single, *self.traces) for moment in moments(trace)]
        return sum(array.nbytes for array in [*arrays, *(moment.values for moment in self.reference.moments)])

    @property
    def digest(self) -> bytes:
        """Hash of all values, on one device and on the ranks."""
        found = hashlib.blake2b()
        for trace in (self.single, *self.traces):
            for moment in moments(trace):
                found.update(repr((moment.step, moment.phase, moment.snapshot.pieces, moment.snapshot.present)).encode())
                found.update(np.ascontiguousarray(moment.snapshot.values).data)
        return found.digest()


class KeptValues:
    """The values of one verdict. They are dropped if newer verdicts need the memory."""

    def __init__(self, values: Values) -> None:
        self.values: Values | None = values


_kept: list[weakref.ref[KeptValues]] = []
_last: list[tuple[object, UserDiagnosis]] = []
"""Last diagnosis, with the values that it explains."""


def keep(values: Values) -> KeptValues:
    """Keep a verdict's values in memory. If all kept values together exceed `MOST_BYTES`, the oldest are dropped."""
    newest, size = KeptValues(values), values.num_bytes
    living = [newest]
    for each in [found for reference in reversed(_kept) if (found := reference()) is not None]:
        if each.values is not None:
            size += each.values.num_bytes
            each.values = each.values if size <= MOST_BYTES else None
            living += [each] if each.values is not None else []
    _kept[:] = [weakref.ref(each) for each in reversed(living)]
    return newest


class Diagnosing:
    """Diagnosis of one verdict. It runs when it is called, perhaps long after the check.

    The user's code may change batches and the model in the meantime, so both are copied.
    """

    def __init__(self, first: Divergence, hint: str, task: Task, values: Values, check_again: Callable[[], UserVerdict]) -> None:
        """`check_again` repeats the check if the memory of `values` was needed for newer verdicts."""
        self._first, self._hint, self._task, self._check_again = first, hint, _unshared(task), check_again
        self._kept, self._state = keep(values), read(ENTRIES)

    def __call__(self) -> UserDiagnosis:
        """Diagnose with torch's and Python's state as it was after the check."""
        with preserved_state(StateKeeper()):
            for entry, value in changes(ENTRIES, self._state):
                if entry.put is not None and entry.copy is None:
                    entry.put(value)
            return self._of_second_check() if self._kept.values is None else self._of_values(self._kept.values)

    def _of_values(self, values: Values) -> UserDiagnosis:
        key = (values.digest, self._task.mesh, self._task.data_axes, self._hint)
        if _last and _last[0][0] == key:  # Hypothesis runs the smallest failing example again, and prints both errors
            return _last[0][1]
        found = diagnosis_of(self._hint, self._task, values)
        _last[:] = [] if found.unfinished else [(key, found)]
        return found

    def _of_second_check(self) -> UserDiagnosis:
        try:
            again = self._check_again()
        except Exception as error:
            return UserDiagnosis(hint=self._hint, unfinished=failure_line("checking again, to look for the cause", error))
        first = again.divergence
        if first is None or (first.step, first.phase, first.tensor) != (self._first.step, self._first.phase, self._first.tensor):
            return UserDiagnosis(hint=self._hint, unfinished=OTHER_VALUES)
        return again.diagnosis.result


def _unshared(task: Task) -> Task:
    batches = tuple(map_tensors(batch, torch.clone) for batch in task.batches)
    if isinstance(task.model, partial) and task.model.func is copy.deepcopy:
        return replace(task, batches=batches, model=partial(copy.deepcopy, task.model()))
    return replace(task, batches=batches)


def diagnosis_of(hint: str, task: Task, values: Values) -> UserDiagnosis:
    """Diagnose a training: find the user's mistake and the first wrong module, and run the spmd_types type checker.

    If no known mistake fits, the result has a hint instead. `hint` is an earlier explanation, which may be part of the result's
    hint.
    """
    # Imported here because most trainings are right.
    from equivcheck.user.diagnosis.diverged import diverged_training
    from equivcheck.user.diagnosis.explain import explanation_of
    from equivcheck.user.diagnosis.place.partial_sums import missing_sum
    from equivcheck.user.diagnosis.place.where import where_of
    from equivcheck.user.diagnosis.typed import opinion_of_types

    try:
        types = opinion_of_types(task)
        diverged = diverged_training(task, values.reference, values.single, values.traces, values.eps)
        if diverged is None:
            return UserDiagnosis(types=types, hint=hint)
        found, place = explanation_of(diverged), where_of(diverged)
        if not found.cause:
            found = missing_sum(diverged, place) or found
        found = replace(found, where=place.sentence, types=types)
    except Exception as error:
        return UserDiagnosis(hint=hint, unfinished=failure_line("looking for the cause", error))
    if found.cause or (found.hint and hint.startswith(NO_MEAN)):  # ranks that are right otherwise have such a loss, too
        hint = ""
    return replace(found, hint="; ".join(filter(None, (hint, found.hint))))


def diagnosis_of_restart(hint: str, run: SingleDeviceRun, reference: Reference, result: RanksResult) -> UserDiagnosis:
    """Search for state that a checkpoint lost. Call this if ranks first differ after the checkpoint was loaded.

    If the lost state reproduces the ranks' values, it is the cause, otherwise a hint.
    """
    from equivcheck.user.diagnosis.restarted import loss_at_restart

    try:
        found = loss_at_restart(run, reference, result)
    except Exception as error:
        return UserDiagnosis(hint=hint, unfinished=failure_line("looking for the cause", error))
    if found.reproduces:
        return UserDiagnosis(cause=found.sentence, kinds=(Cause.NOT_RESTORED,))
    return UserDiagnosis(hint="; ".join(filter(None, (hint, found.sentence))))


def diagnosis_of_failure(task: Task) -> UserDiagnosis:
    """Run the spmd_types type checker on a training that crashed or hung."""
    from equivcheck.user.diagnosis.typed import opinion_of_types

    with preserved_state(StateKeeper()):
        try:
            return UserDiagnosis(types=opinion_of_types(task))
        except Exception as error:
            return UserDiagnosis(unfinished=failure_line("asking the type checker", error))
