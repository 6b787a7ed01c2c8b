"""Finds the first module at which the ranks differ from one device, in a second run with hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from equivcheck.diagnosis.evidence import axis_combinations
from equivcheck.diagnosis.words import join_words, name_ranks
from equivcheck.oracle.comparison.compare import compare
from equivcheck.oracle.reference.noise import ABSOLUTE, FACTOR
from equivcheck.training.threads import one_thread
from equivcheck.user.batches import convert_batch
from equivcheck.user.diagnosis.diverged import DivergedTraining, parameters_by_name
from equivcheck.user.diagnosis.interception import observe_clipping
from equivcheck.user.diagnosis.place.dependencies import Dependencies
from equivcheck.user.diagnosis.place.modules import Key, ModuleTensor, WatchedRun, watched_device, watched_rank
from equivcheck.user.diagnosis.place.parts import Agreement, PartComparer, Status, distance, norm_of
from equivcheck.user.randomness import seed_generators
from equivcheck.user.ranks import build_model
from equivcheck.user.reference import perturbed_start, reference_from
from equivcheck.user.traces.compared_phases import without_phases
from equivcheck.user.traces.settings import UserTrace
from equivcheck.worlds.failure import RanksFailed
from equivcheck.worlds.pool import ranks
from equivcheck.worlds.sim.stand_ins.compiling import REFUSAL
from equivcheck.worlds.trace.differences import Phase

COMPILED = "no module is named, because your model is compiled and runs as one function"
CLIPPING = "gradient clipping, at step {step}: all gradients agree before it"
ONLY_LOSS = "all module outputs agree at step {step}; the first difference is in the loss"
ONLY_PARAMETERS = (
    "all module outputs and output gradients agree at step {step}; the first difference is in the parameter gradients"
)
NUM_COPIES = 4
"""Number of perturbed single-device runs; they set the tolerances."""
MOST = 2
"""Maximum number for further modules that are named, and for partial sums."""
_AGREE = (Status.RIGHT, Status.PARTIAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The first place at which ranks differ from one device."""

    sentence: str = ""
    """Sentence about the place; empty if it is not known."""
    partial: tuple[tuple[Key, tuple[str, ...]], ...] = ()
    """Tensors at this place, or just before it, that are right only if they are added up over some mesh axes."""


def where_of(diverged: DivergedTraining) -> Where:
    """Find the first module with wrong values, and describe it. The ranks train again to record module tensors.

    Returns an empty `Where` if the update or a reported value differs first, or if no single module is first. Also empty if the
    ranks first differ in another tensor when they train again.
    """
    if diverged.first.phase not in (Phase.LOSS, Phase.GRADIENT):
        return Where()
    with observe_clipping():
        try:
            members = ranks("sim", diverged.task.num_ranks)
            found: Sequence[WatchedRun] = members.run(watched_rank, diverged.task, diverged.first.step).values
        except RanksFailed as error:
            culprit = error.failure.culprit
            return Where(sentence=COMPILED if culprit is not None and REFUSAL in culprit.error else "")
        again = compare(diverged.reference, [_as_compared(diverged, each.trace) for each in found]).divergences
        first = diverged.first
        if not again or (again[0].step, again[0].phase, again[0].tensor) != (first.step, first.phase, first.tensor):
            return Where()
        with one_thread():
            return _Search(diverged, found).place()


def _as_compared(diverged: DivergedTraining, trace: UserTrace) -> UserTrace:
    """Return the trace without the phases that the reference leaves out."""
    moments = diverged.reference.moments
    present = {moment.phase for moment in moments if any(moment.present)}
    left_out = {phase for phase in (Phase.LOSS, Phase.GRADIENT) if phase not in present}
    phases = [moment.phase for moment in moments]
    buffers = phases.count(Phase.BUFFER) > 1
    return without_phases(trace, left_out, reports=Phase.REPORTED in phases, buffers=buffers)


class _Search:
    """Compares the tensors of all modules at the first wrong step, in execution order."""

    def __init__(self, diverged: DivergedTraining, found: Sequence[WatchedRun]) -> None:
        self._diverged, self._found, self._step = diverged, found, diverged.first.step
        task, eps = diverged.task, diverged.eps
        with seed_generators(task.seed):
            model = build_model(task)
            batches = [convert_batch(batch, task.dtype) for batch in task.batches]
            self._single = watched_device(task, self._step, model, batches, keeps_nodes=True)
            starts = (perturbed_start(task, number, eps) for number in range(NUM_COPIES))
            self._copies = [watched_device(task, self._step, **start) for start in starts]
        self._dependencies = Dependencies(self._single.seen, parameters_by_name(model))
        self._expected = {each.key: each for each in self._single.seen if not _is_loss(each)}
        self._tolerances = _tolerances(self._single.seen, self._copies, eps)
        self._by_key = [{each.key: each for each in watched.seen} for watched in found]
        self._comparer = PartComparer(task, diverged.coordinates, eps)
        self._agreements: dict[Key, Agreement] = {}

    def place(self) -> Where:
        """Describe the first place at which the ranks differ; empty if the place is in doubt."""
        forward = [key for key in self._expected if not key.is_gradient and self._may_matter(key)]
        self._compare(forward, (1.0,))
        if self._are_inputs_regrouped():
            return Where()
        wrong = self._first_unexplained(forward, Status.WRONG)
        if self._diverged.first.phase is Phase.LOSS:
            named = wrong or self._first_unexplained(forward, Status.PARTIAL)
            return self._about(named) if named else self._if_all_agree(forward, ONLY_LOSS)
        if wrong is not None:
            # Either the loss was not compared, or it agrees although this tensor differs.
            return self._about(wrong) if not self._compares_loss() else Where()
        return self._about_gradients(forward)

    def _about_gradients(self, forward: Sequence[Key]) -> Where:
        names = self._wrong_gradients()
        if not names:
            return Where(sentence=CLIPPING.format(step=self._step))
        backward = [key for key in self._expected if key.is_gradient]
        usual = {1.0, float(self._diverged.task.num_data_ranks)}
        counts = {float(self._diverged.size(axes)) for axes in axis_combinations(self._diverged.wide_axes)}
        scales = self._compare(backward, (*sorted(usual), *sorted(counts - usual)))
        nearest = {key: self._dependencies.nearest_parameters(key) for key in backward}
        named = self._first_unexplained((key for key in backward if nearest[key] & names), Status.WRONG)
        if named is None:
            named = self._first_unexplained((key for key in backward if nearest[key] and nearest[key] <= names), Status.PARTIAL)
        if named is not None:
            return self._about(named)
        # Another factor may come from the user's loss, or it may be the fault.
        return self._if_all_agree([*forward, *backward], ONLY_PARAMETERS) if usual & {*scales} else Where()

    def _are_inputs_regrouped(self) -> bool:
        """Whether ranks pass the same values to the model as one device, but in other calls.

        Then no module's tensor can be compared.
        """
        keys = [key for key in self._expected if not key.module and key.is_input and not key.is_gradient]
        statuses = [self._agreements[key].status for key in keys if key in self._agreements]
        if len({key.call for key in keys}) < 2 or Status.WRONG not in statuses:
            return False
        axes = self._diverged.same_row_axes
        firsts = [each.rank for each in self._diverged.coordinates if not any(each.indices[name] for name in axes)]
        found = [self._by_key[rank][key].values for rank in firsts for key in keys if key in self._by_key[rank]]
        return torch.equal(_sorted([self._expected[key].values for key in keys]), _sorted(found))

    def _may_matter(self, key: Key) -> bool:
        """Whether the loss may depend on a tensor: the tensor has a gradient, or cannot have one."""
        return self._expected[key].node is None or key._replace(is_gradient=True) in self._expected

    def _compares_loss(self) -> bool:
        moments = self._diverged.reference.moments
        return any(any(moment.present) for moment in moments if (moment.step, moment.phase) == (self._step, Phase.LOSS))

    def _compare(self, keys: Iterable[Key], scales: tuple[float, ...]) -> tuple[float, ...]:
        """Compare tensors, and return the factors that fit all tensors.

        The user's loss may be a mean over a rank's own rows or positions, which multiplies all gradients by one factor.
        """
        for key in keys:
            parts = [tensors.get(key) for tensors in self._by_key]  # None on a rank that lacks the tensor
            full = self._expected[key].values
            for scale in scales:
                found = self._comparer.compare(full, parts, self._tolerances[key], scale)
                if scale == scales[0] or found.status in _AGREE:
                    self._agreements[key] = found
                if found.status in _AGREE:
                    scales = (scale,) if full.any() else scales
                    break
        return scales

    def _first_unexplained(self, keys: Iterable[Key], status: Status) -> Key | None:
        """Return the first tensor with this status that is not computed from a tensor with right values."""
        right = self._right()
        found = (key for key in keys if self._agreements[key].status is status)
        return next((key for key in found if not any(self._follows(other, key) for other in right)), None)

    def _right(self) -> list[Key]:
        found = ((key, agreement) for key, agreement in self._agreements.items() if self._expected[key].values.any())
        return [key for key, agreement in found if agreement.status is Status.RIGHT]

    def _follows(self, later: Key, key: Key) -> bool:
        """Whether one tensor is computed from another. Both tensors belong to forward, or both to backward."""
        if later.is_gradient != key.is_gradient:
            return False
        return self._dependencies.is_computed_from(*((key, later) if key.is_gradient else (later, key)))

    def _about(self, key: Key) -> Where:
        agreement, module = self._agreements[key], key.module or "the full model"
        more = self._not_compared_before(key)
        if agreement.status is Status.PARTIAL:
            partial, which = [key], f"{noun_of(key)} is right only as a sum over {self._diverged.ranks_text(agreement.axes)}"
            ranks = ""
        else:
            partial, which = self._before(key, Status.PARTIAL), f"{noun_of(key)} differs"
            more = f"; the fault is after {_name(partial[0])}, which is right as a sum over ranks{more}" if partial else more
            ranks = f", {name_ranks(agreement.ranks)}"
        way = "backward" if key.is_gradient else "forward"
        call = f", in call {key.call + 1} of the step" if key.call else ""
        sentence = f"first module whose {which}: {module} ({way}{ranks}{call}), at step {self._step}{more}"
        return Where(sentence=sentence, partial=tuple((each, self._agreements[each].axes) for each in partial[:MOST]))

    def _not_compared_before(self, key: Key) -> str:
        inside = f"{key.module}." if key.module else ""
        found = [each for each in self._before(key, Status.UNKNOWN) if key.is_input or not each.module.startswith(inside)]
        return f"; not compared before it: {_shorten(list(map(_name, found)))}" if found else ""

    def _before(self, key: Key, status: Status) -> list[Key]:
        """Return the tensors with this status from which a tensor is computed without a right tensor in between."""
        right = [each for each in self._right() if self._follows(key, each)]
        found = [each for each, agreement in self._agreements.items() if agreement.status is status and self._follows(key, each)]
        return [each for each in found if not any(self._follows(other, each) for other in right)]

    def _if_all_agree(self, keys: Sequence[Key], sentence: str) -> Where:
        agree = all(self._agreements[key].status in _AGREE for key in keys)
        return Where(sentence=sentence.format(step=self._step)) if agree else Where()

    def _wrong_gradients(self) -> set[str]:
        """Names of parameters with a wrong gradient, before clipping if the step clips."""
        traces = [each.trace for each in self._found]
        reference = self._diverged.reference
        if any(each.unclipped is not None for each in (self._single, *self._found)):
            single, copies = self._with_unclipped(self._single), [self._with_unclipped(each) for each in self._copies]
            reference = reference_from(self._diverged.task, single, copies, self._diverged.eps)
            traces = [self._with_unclipped(each) for each in self._found]
        at = self._step, Phase.GRADIENT
        return {each.tensor for each in compare(reference, traces).divergences if (each.step, each.phase) == at}

    def _with_unclipped(self, watched: WatchedRun) -> UserTrace:
        """A trace with gradients before clipping at the watched step."""
        steps = list(watched.trace.steps)
        steps[self._step] = replace(steps[self._step], gradients=watched.unclipped or steps[self._step].gradients)
        return replace(watched.trace, steps=tuple(steps))


def _sorted(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors] or [torch.empty(0)]).sort().values


def _is_loss(tensor: ModuleTensor) -> bool:
    """Whether the full model returns its loss, compared as such."""
    return not tensor.key.module and not tensor.key.is_input and tensor.values.numel() == 1


def noun_of(key: Key) -> str:
    """Return a noun for a module's tensor, such as ``output`` or ``input gradient``."""
    return f"{'input' if key.is_input else 'output'}{' gradient' if key.is_gradient else ''}"


def _name(key: Key) -> str:
    return f"the {noun_of(key)} of {key.module or 'the full model'}"


def _shorten(words: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(words))
    more = [f"{len(distinct) - MOST} more"] if len(distinct) > MOST else []
    return join_words([*distinct[:MOST], *more])


def _tolerances(seen: Sequence[ModuleTensor], copies: Sequence[WatchedRun], eps: float) -> dict[Key, float]:
    """Tolerance per tensor, from its distance in perturbed copies."""
    sizes = {each.key: norm_of(each.values) for each in seen}
    largest = {kind: max((size for key, size in sizes.items() if key.is_gradient is kind), default=0.0) for kind in (False, True)}
    spread = dict.fromkeys(sizes, 0.0)
    for copy in copies:
        others = {each.key: each.values for each in copy.seen}
        for each in seen:
            other = others.get(each.key)
            if other is not None and other.shape == each.values.shape:
                spread[each.key] = max(spread[each.key], distance(other, each.values))
    return {key: FACTOR * max(spread[key], eps * size) + ABSOLUTE * eps * largest[key.is_gradient] for key, size in sizes.items()}
