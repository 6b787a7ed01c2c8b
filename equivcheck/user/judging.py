"""Runs `check_training`, and decides about its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from equivcheck.errors import UsageError
from equivcheck.layouts.composition.running import RanksResult
from equivcheck.oracle.judge import ExpectedRun, judge, judge_failure
from equivcheck.oracle.reference.noise import Expected
from equivcheck.oracle.reference.reference import Reference
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.oracle.verdict.sentences import sentence
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.system.tally import record_check
from equivcheck.user.batches import require_parts
from equivcheck.user.diagnosing import NO_MEAN, Diagnosing, Values, diagnosis_of_failure, diagnosis_of_restart
from equivcheck.user.lazy_diagnosis import LazyDiagnosis, UserDiagnosis
from equivcheck.user.messages.notes import missing_evidence, notes_on
from equivcheck.user.precision.advice import on_narrowing, on_precision
from equivcheck.user.precision.kept import require_kept
from equivcheck.user.precision.policy import precision_text, require_precision
from equivcheck.user.precision.run import RoundedRun, casting_of, exact_task
from equivcheck.user.reference import SingleDeviceRun
from equivcheck.user.resuming.parts import first_part, require_restart, second_part
from equivcheck.user.running import members_of, run_training
from equivcheck.user.task import Task
from equivcheck.user.traces.compared_phases import ABOUT_REPORTED, phases_left_out, require_same_reports, without_phases
from equivcheck.user.traces.measures import Measures, first_gradients, measures_of
from equivcheck.user.traces.settings import UserTrace, other_settings
from equivcheck.user.usage import API
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.call import Call
from equivcheck.worlds.failure import CAUSED_BY, Failure
from equivcheck.worlds.pool import LOCAL_WORLDS, on_first_rank
from equivcheck.worlds.ranks import Ranks, Run
from equivcheck.worlds.state.keeper import StateKeeper, preserved_state
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase
from equivcheck.worlds.trace.trace import Trace
from equivcheck.worlds.world import World, unwrap_world


def check_task(task: Task, world: str | Ranks | World, schedule_seed: int, deadline: float, *, explain: bool) -> UserVerdict:
    """Train on one device and on ranks, compare them, and return the verdict, as `check_training` does."""
    place = unwrap_world(world)
    with preserved_state(StateKeeper()):  # the single-device run executes user code, too
        return on_first_rank(place, lambda: _recorded(_checked(task, place, schedule_seed, deadline, explain=explain)))


def _recorded(verdict: UserVerdict) -> UserVerdict:
    record_check(API, verdict.world, verdict.outcome.value)
    return verdict


def _checked(task: Task, world: str | Ranks, schedule_seed: int, deadline: float, *, explain: bool) -> UserVerdict:
    started = time.perf_counter()
    require_parts(task)
    require_precision(task)
    require_kept(task)
    require_restart(task)
    if task.resume is not None:
        require_parts(second_part(task))
    members = members_of(task, world)
    original = SingleDeviceRun(task if task.precision is None else exact_task(task))
    in_short = str(original.precision).removeprefix("torch.") if task.precision is None else precision_text(task)
    verdict = UserVerdict(outcome=Outcome.EQUIVALENT, name=task.name, mesh=task.mesh, world=members.name, precision=in_short)
    found = run_training(members, task, schedule_seed, deadline)
    left, ran, before = found.left, found.members, found.before
    notes = notes_on(task, left, members, ran, outside=original.outside, has_restarted=bool(before))
    verdict = replace(verdict, world=ran.name, notes=(*notes, *found.notes))
    if isinstance(left, Failure):
        _raise_usage_error(left)
        verdict = judge_failure(verdict, left)
        if explain:
            verdict = replace(verdict, diagnosis=LazyDiagnosis(partial(diagnosis_of_failure, task)))
    else:
        result = RanksResult(run=left, before=before)
        run = original if task.precision is None else RoundedRun(task, original, casting_of((*before, *left.values)))
        local = ran.name if ran.name in LOCAL_WORLDS else world  # ranks that the caller brought may be closed later
        check_again = partial(_checked, world=local, schedule_seed=schedule_seed, deadline=deadline, explain=explain)
        judged = _judged(verdict, run, result, check_again if explain and task.precision is None else None)
        if isinstance(run, RoundedRun) and judged.outcome is Outcome.DIVERGED:
            judged = _judged_without_parts(verdict, judged, run, result)
        advice = (*on_narrowing(run), *on_precision(task, left.values, judged.outcome))
        verdict = replace(judged, notes=(*judged.notes, *advice))
    return replace(verdict, seconds=time.perf_counter() - started)


def _raise_usage_error(failure: Failure) -> None:
    """Raise a rank's `UsageError` here too, because an invalid argument is not a failure of the training."""
    for report in failure.reports:
        kind, _, text = report.error.partition(": ")
        if kind.endswith(UsageError.__name__) and text.startswith(f"{API}: "):
            raise UsageError(text.partition(CAUSED_BY)[0]) from None  # the message itself says all


CheckAgain = Callable[[Task], UserVerdict]
"""Function that checks a training on the same ranks."""


def _judged(verdict: UserVerdict, original: SingleDeviceRun, result: RanksResult, check_again: CheckAgain | None) -> UserVerdict:
    before: tuple[Any, ...] = result.before
    require_same_reports(original.trace, (*before, *result.run.values))
    case = UserCase(original, result.run.values, before)
    result = RanksResult(run=replace(result.run, values=case.traces), before=case.before)
    verdict, doubt = judge(verdict, case.judge_case(), result)
    notes = dict.fromkeys((*verdict.notes, *case.left_out.values()))
    verdict = replace(verdict, unread=case.unread, measures=case.measures(result.run.calls), notes=tuple(notes))
    if verdict.divergence is not None:
        return _with_diagnosis(verdict, verdict.divergence, case, result, check_again)
    other = case.other_settings
    if other is not None:
        diagnosis = LazyDiagnosis(result=_about_setting(other) if check_again is not None else None)
        return replace(verdict, outcome=Outcome.DIVERGED, reason=sentence(other), divergence=other, diagnosis=diagnosis)
    if verdict.outcome is Outcome.EQUIVALENT:
        missing = missing_evidence(original.task, changes_parameters=original.changes_parameters)
        if not missing and original.task.precision is not None and case.apart_in_parts:
            missing = f"{case.apart_in_parts}, so agreement under precision=, which compares with these parts, proves nothing"
        if missing:
            return replace(verdict, outcome=Outcome.INCONCLUSIVE, reason=missing)
    if doubt is not None and doubt.step:
        return replace(verdict, reason=f"{verdict.reason}; all steps before step {doubt.step} agree")
    return verdict


def _with_diagnosis(
    verdict: UserVerdict, first: Divergence, case: UserCase, result: RanksResult, check_again: CheckAgain | None
) -> UserVerdict:
    hint, run = case.hint(first), case.run
    if check_again is None:
        return replace(verdict, diagnosis=LazyDiagnosis(result=UserDiagnosis(hint=hint)))
    if run.task.resume is None:
        values = Values(reference=case.confirming_reference, single=run.trace, traces=case.traces, eps=run.eps)
        diagnosing = Diagnosing(first, hint, run.task, values, partial(check_again, run.task))
        return replace(verdict, diagnosis=LazyDiagnosis(diagnosing))
    if first.step < run.task.resume.after:  # diagnose the first part like a training without a checkpoint
        alone = SingleDeviceRun(first_part(run.task))
        judged = _judged(verdict, alone, RanksResult(run=Run(values=case.before)), check_again)
        return judged if judged.outcome is Outcome.DIVERGED else verdict
    found = diagnosis_of_restart(hint, run, case.confirming_reference, result)
    return replace(verdict, diagnosis=LazyDiagnosis(result=found))


def _judged_without_parts(verdict: UserVerdict, diverged: UserVerdict, run: RoundedRun, result: RanksResult) -> UserVerdict:
    """Judge ranks that differ from the single-device run in parts, if that run also differs from the run over full batches.

    Ranks that agree with the full batch, such as those whose loss gathers rows, are INCONCLUSIVE.
    """
    before: tuple[Any, ...] = result.before
    where = UserCase(run, result.run.values, before).first_moment_apart
    if not where:
        return diverged
    judged = _judged(verdict, run.over_full_batch(), result, None)
    if judged.outcome is not Outcome.EQUIVALENT:
        return judged
    return replace(judged, outcome=Outcome.INCONCLUSIVE, reason=_ABOUT_FULL_BATCH.format(where=where))


_ABOUT_FULL_BATCH = (
    "your ranks agree with the full batch on one device, but only within the rounding of low precision. The ranks' rows part by "
    "part would be a closer reference, but they give other values on one device ({where}), because your loss or a layer is not a "
    "mean over rows. Check this training in float64, without precision="
)


def _about_setting(found: Divergence) -> UserDiagnosis:
    name, _, key = found.tensor.rpartition("/")
    cause = f"after the last step, {key} is {found.actual}, not {found.expected}, for `{name}`"
    return UserDiagnosis(cause=cause, kinds=(Cause.HYPERPARAMETER,))


_ABOUT_SHARDS = (
    "if this parameter is a plain shard and not a DTensor, pass cuts={name: ((dim, axis),)} with its position, "
    "or full_tensors=fn(module) -> {name: tensor}"
)


_ABOUT_LOSSES = (
    "ranks that differ only along {axes} get the same rows, so each must return the same loss. If yours return the loss over "
    "their own rows, positions or classes, reduce it over these ranks, or return None on all but one"
)


class UserCase:
    """A user's training, prepared for comparison: the single-device run and the ranks' traces.

    Phases that cannot be compared are left out.
    """

    def __init__(self, run: SingleDeviceRun, traces: Sequence[UserTrace], before: Sequence[UserTrace] = ()) -> None:
        self.left_out = phases_left_out(run.trace, (*before, *traces))
        """Phases that cannot be compared, each with a note."""
        limited = partial(
            without_phases,
            phases=self.left_out,
            reports=any(step.reported for step in run.trace.steps),
            buffers=any(step.buffers is not None for step in run.trace.steps),
        )
        self.traces = tuple(map(limited, traces))
        """The ranks' traces without these phases."""
        self.before = tuple(map(limited, before))
        """Such traces before a checkpoint; empty without a checkpoint."""
        self.run = run
        """The single-device run."""

    def judge_case(self) -> ExpectedRun:
        """Return the references for the comparison, and the number of steps that must be compared for the outcome EQUIVALENT."""
        return ExpectedRun(
            reference=lambda: self._readable(self._quick),
            confirming_reference=lambda: self._readable(self.run.confirming_reference(None if self._far else self._parts)),
            required_steps=len(self.run.task.batches),
        )

    @property
    def confirming_reference(self) -> Reference:
        """Reference for confirming a divergence. More runs than for the first comparison measure its noise.

        Tensors that ranks do not have are left out.
        """
        return self.judge_case().confirming_reference()

    def hint(self, first: Divergence) -> str:
        """Return a possible explanation for the first divergence; empty if none is known."""
        if first.difference is Difference.SHAPE and first.phase is not Phase.REPORTED:
            pieces = [piece for trace in self.traces for piece in trace.steps[0].parameters.pieces]
            is_located = any(piece.name == first.tensor and (piece.start or piece.run is not None) for piece in pieces)
            return "" if is_located else _ABOUT_SHARDS
        if first.phase is Phase.LOSS and first.difference is Difference.RANKS_DISAGREE:
            return _ABOUT_LOSSES.format(axes=", ".join(self.run.task.loss_axes))
        if first.phase is Phase.REPORTED and "/" not in first.tensor:
            return ABOUT_REPORTED.format(name=first.tensor)
        apart = self.apart_in_parts
        return f"{apart}, so ranks that only average their gradients cannot agree with one device" if apart else ""

    @property
    def apart_in_parts(self) -> str:
        """Hint that one device gets other values if it processes the ranks' rows part by part.

        Empty if the values are equal.
        """
        where = self.first_moment_apart
        apart = f"{NO_MEAN}: one device that processes the ranks' rows part by part computes something else ({where})"
        return apart if where else ""

    @property
    def first_moment_apart(self) -> str:
        """First step and phase at which values differ if one device processes the rows part by part. Empty if none differs."""
        return "" if self._far is None else f"step {self._far.step}, {self._far.phase.value}"

    def measures(self, calls: Sequence[Sequence[Call]]) -> Measures | None:
        """Return loss and gradient norm at the first step, and numbers of collective calls.

        None if rounding dominates the first gradients.
        """
        gradients = first_gradients(self._quick.moments)
        if gradients is None:
            return None
        if self.before:  # the calls are those after the checkpoint
            return measures_of(self.run.trace, gradients, self.before, (), self._quick.loss_groups_before)
        return measures_of(self.run.trace, gradients, self.traces, calls, self._quick.loss_groups)

    @property
    def other_settings(self) -> Divergence | None:
        """First optimizer setting, such as a learning rate, that clearly differs between a rank and one device."""
        return other_settings(self.run.trace, self.traces, self._quick.noise_limit)

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of optimizer state that no rank could read. Empty unless the user passes `full_tensors` or a trainer."""
        if self.run.task.full_tensors is None and self.run.task.trainer is None:
            return ()
        states = (moment for moment in self._readable(self._quick).moments if moment.phase is Phase.STATE)
        return tuple(name for state in states for name, there in zip(state.table.names, state.present, strict=True) if not there)

    @cached_property
    def _quick(self) -> Reference:
        return self.run.reference()

    @cached_property
    def _parts(self) -> Trace | None:
        return self.run.parts()

    @cached_property
    def _far(self) -> Expected | None:
        """First compared step and phase at which the run over the ranks' parts differs by more than rounding.

        None if both runs agree.
        """
        return self.run.far_moment(self._quick, self._parts)

    def _readable(self, reference: Reference) -> Reference:
        """The reference without phases that cannot be compared, and without state that `full_tensors` leaves unread."""
        task = self.run.task
        may_lack_state = task.full_tensors is not None or task.trainer is not None
        if not may_lack_state and not self.left_out:
            return reference
        held = {piece.name for trace in self.traces for piece in trace.state.pieces}
        moments = list(reference.moments)
        for index, moment in enumerate(moments):
            if moment.phase in self.left_out or (moment.phase is Phase.BUFFER and task.trainer is not None):
                moments[index] = replace(moment, present=(False,) * len(moment.present))
            elif moment.phase is Phase.STATE and may_lack_state:
                present = (there and name in held for name, there in zip(moment.table.names, moment.present, strict=True))
                moments[index] = replace(moment, present=tuple(present))
        return replace(reference, moments=tuple(moments))
