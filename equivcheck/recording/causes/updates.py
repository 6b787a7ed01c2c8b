"""Mistakes in updates: no update, lost state, wrong step counts, another decay. Gradients are right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from equivcheck.diagnosis.words import name_ranks
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.recording.causes.candidate import CLEARER, Candidate
from equivcheck.recording.causes.evidence import Evidence, Tensors, entries_of, linear_combination, rms
from equivcheck.recording.causes.settings import (
    Settings,
    differing,
    groups_at,
    has_linear_decay,
    number,
    other_settings,
    pairs_at,
)
from equivcheck.recording.causes.update import Update
from equivcheck.recording.compare.verdict import relative_error
from equivcheck.recording.trace import Moment

PRECISE = 64.0
"""Factor by which differences must exceed the tolerance before two step counts can be told apart."""
NEARLY = 1e-6
"""Share of a difference that Adam's `eps` may explain."""


def wrong_updates(update: Update) -> Iterator[Candidate]:
    """Yield possible mistakes in the optimizer's update, such as no update, lost state, or a wrong step count."""
    pairs = pairs_at(update.evidence, update.evidence.step)
    if not any(number(one, "lr") and not number(other, "lr") for one, other in pairs):
        yield _without_update(update)
    if any(differing(pair) for pair in pairs):
        yield from other_settings(update, pairs)
        return
    yield from _still_shards(update.evidence)
    groups = groups_at(update.evidence.first, update.evidence.step)
    if len(groups) == 1:
        yield from _of_sgd(update, groups[0])
        yield from _step_counts(update, groups[0])
        yield from _lost_moments(update, groups[0])
    yield from _decays(update, groups)
    yield from _scaled(update)


def _without_update(update: Update) -> Candidate:
    """Return the candidate in which parameters stay as before the update. The update may come one step late."""
    evidence, step = update.evidence, update.evidence.step
    later = evidence.sums(evidence.second, step + 1, Moment.UPDATE)
    changed = [name for name in evidence.wrong if name in later and (later[name] != evidence.found_sums[name]).any()]
    cause, words = Cause.NOT_UPDATED, "the optimizer does not update {parameters}"
    if changed:
        is_late = all(rms(later[name] - evidence.expected_sums[name]) <= evidence.limits[name] for name in changed)
        cause = Cause.STALE if is_late else cause
        words += f" at step {step}" + (", but one step later" if is_late else "")
    return update.candidate(cause, words, [linear_combination((0.0, update.before))])


def _still_shards(evidence: Evidence) -> Iterator[Candidate]:
    """Yield ranks whose shards do not change at all, although these ranks have gradients."""
    run, step = evidence.second, evidence.step
    gradients = {(rank, entry.piece) for rank, entry in entries_of(run, step, Moment.GRADIENT) if entry.sketch.squares}
    before = {
        (rank, entry.piece): entry
        for rank, entry in (*entries_of(run, step - 1, Moment.UPDATE), *entries_of(run, step, Moment.START))
    }
    changes: dict[int, list[bool]] = {}
    for rank, entry in entries_of(run, step, Moment.UPDATE):
        earlier = before.get((rank, entry.piece))
        if earlier is not None and (rank, entry.piece) in gradients and entry.piece.numel < math.prod(entry.piece.shape):
            changes.setdefault(rank, []).append((entry.sketch.sums != earlier.sketch.sums).any())
    still = [rank for rank, own in changes.items() if not any(own)]
    if still and len(still) < len(changes) and all(all(own) for rank, own in changes.items() if rank not in still):
        words = f"the optimizer does not update any parameter on {name_ranks(still)}"
        yield Candidate(cause=Cause.NOT_UPDATED, words=words, errors=dict.fromkeys(evidence.wrong, 0.0))


def _of_sgd(update: Update, settings: Settings) -> Iterator[Candidate]:
    """Yield momentum that is lost, the previous step's gradients, and several updates in place of one."""
    if settings.get("optimizer") != "SGD" or settings.get("nesterov") or settings.get("maximize"):
        return
    evidence, step, momentum = update.evidence, update.evidence.step, number(settings, "momentum")
    rate, decay = number(settings, "lr"), number(settings, "weight_decay")

    def move_by(gradients: Tensors) -> Tensors:
        return linear_combination((-rate, gradients), (-rate * decay, update.before))

    gradients = [evidence.sums(evidence.second, each, Moment.GRADIENT) for each in (step - 1, step)]
    if momentum and all(gradients) and not number(settings, "dampening"):
        when = _when_lost(update, settings)
        yield update.candidate(Cause.STATE_LOST, f"the optimizer state is lost before {when}", [move_by(gradients[1])])
    if not momentum and all(gradients):
        words = "the optimizer uses the gradients of the previous step"
        yield update.candidate(Cause.STALE, words, [move_by(gradients[0])])
    if momentum and step == evidence.first.steps[0] and not decay and not number(settings, "dampening"):
        for count in range(2, 9):
            factor = sum((count - earlier) * momentum**earlier for earlier in range(count))
            words = f"the optimizer steps {count} times per step, each time with the same gradients"
            moved = linear_combination((factor, update.moved))
            yield update.candidate(Cause.STEPPED_EACH_MICROBATCH, words, [moved], size=factor)


def _when_lost(update: Update, settings: Settings) -> str:
    """Return words for the steps before which momentum is lost, from the step after the first one."""
    evidence, step = update.evidence, update.evidence.step
    gradients = evidence.sums(evidence.second, step + 1, Moment.GRADIENT)
    after = evidence.sums(evidence.second, step + 1, Moment.UPDATE)
    rate, decay = number(settings, "lr"), number(settings, "weight_decay")
    fresh = linear_combination((1.0 - rate * decay, evidence.found_sums), (-rate, gradients))
    if not after or not fresh:
        return f"step {step}"
    is_lost_again = all(rms(after[name] - fresh[name]) <= evidence.limits[name] for name in evidence.wrong if name in fresh)
    return "each step" if is_lost_again and step == 1 else f"step {step}{'' if is_lost_again else ', once'}"


def _step_counts(update: Update, settings: Settings) -> Iterator[Candidate]:
    """Yield Adam's bias correction with another step count, if gradients are large compared with `eps`."""
    betas = settings.get("betas")
    error = max(update.evidence.trivial_error(name) for name in update.evidence.wrong)
    if not isinstance(betas, tuple) or update.evidence.first.steps[0] or error < PRECISE:
        return
    right = update.evidence.step + 1
    own = number(settings, "lr") * number(settings, "weight_decay") * has_linear_decay(settings)
    for count in {right + 1, right - 1, 2 * right} - {0}:
        factor = _correction(betas, count) / _correction(betas, right)
        words = f"the optimizer counts step {right} as step {count}"
        moved = linear_combination((factor, update.moved), ((factor - 1.0) * own, update.before))
        # Adam's `eps` changes the factor by less than a millionth if gradients are large.
        yield update.candidate(Cause.STEP_COUNT, words, [moved], size=max(factor, NEARLY * error))


def _correction(betas: tuple[float, float], count: int) -> float:
    return math.sqrt(1.0 - betas[1] ** count) / (1.0 - betas[0] ** count)


def _decays(update: Update, groups: Sequence[Settings]) -> Iterator[Candidate]:
    """Yield updates with another weight decay in B than its settings say."""
    tensors, evidence = update.evidence.first.tensors, update.evidence
    are_vectors = all(len(tensors[evidence.step, evidence.moment, name].entries[0].piece.shape) < 2 for name in evidence.wrong)
    has_group_without = any(not number(group, "weight_decay") for group in groups)
    for amount in {number(group, "lr") * number(group, "weight_decay") for group in groups if has_linear_decay(group)} - {0.0}:
        # Twice in one product, or one after the other.
        more = [linear_combination((1.0, update.moved), (own - amount, update.before)) for own in (0.0, amount**2)]
        less = linear_combination((1.0, update.moved), (amount, update.before))
        if not has_group_without:
            yield update.candidate(Cause.DECAY_TWICE, "weight decay is applied twice", more)
        elif are_vectors:
            words = "all parameters have the largest weight decay of any group"
            yield update.candidate(Cause.DECAY_EVERYWHERE, words, more)
        yield update.candidate(Cause.HYPERPARAMETER, "weight decay is not applied", [less])


def _lost_moments(update: Update, settings: Settings) -> Iterator[Candidate]:
    """Yield lost state of Adam. The first moment at the end shows since which step gradients have been averaged."""
    evidence, betas = update.evidence, settings.get("betas")
    steps = evidence.second.steps
    gradients = [evidence.sums(evidence.second, step, Moment.GRADIENT) for step in steps]
    state = evidence.sums(evidence.second, steps[-1], Moment.STATE)
    is_coupled = number(settings, "weight_decay") and not has_linear_decay(settings)
    if not isinstance(betas, tuple) or not evidence.step or steps[0] or not state or not all(gradients) or is_coupled:
        return
    if any(f"{name}/exp_avg" not in state or any(name not in own for own in gradients) for name in evidence.wrong):
        return
    limits = {name: evidence.tolerance((steps[-1], Moment.STATE, f"{name}/exp_avg")) for name in evidence.wrong}
    weights = [(1.0 - betas[0]) * betas[0] ** (steps[-1] - step) for step in steps]

    def errors(since: int) -> dict[str, float]:
        averages = linear_combination(*zip(weights[since:], gradients[since:], strict=True))
        return {name: relative_error(rms(state[f"{name}/exp_avg"] - averages[name]), limit) for name, limit in limits.items()}

    if max(errors(0).values()) < CLEARER:
        return
    for since in dict.fromkeys((evidence.step, steps[-1])):
        each = since > evidence.step == 1
        when = "each step" if each else f"step {since}" + (", once" if since < steps[-1] else "")
        if each or since == evidence.step:
            words = f"the optimizer state is lost before {when}"
            yield Candidate(cause=Cause.STATE_LOST, words=words, errors=errors(since))


def _scaled(update: Update) -> Iterator[Candidate]:
    """Yield the factor on updates that fits best."""
    found = update.fit([update.moved])
    if found is not None:
        factor = float(found[0])
        words = f"{{updates}} {factor:.6g} times as large as in A"
        moved = linear_combination((factor, update.moved))
        yield update.candidate(Cause.SCALED, words, [moved], size=abs(factor), fitted=1)
