"""Optimizer settings in two recorded runs, and the updates that other settings would give."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from equivcheck.diagnosis.mistakes.schedules import describe_schedule
from equivcheck.diagnosis.words import join_words
from equivcheck.oracle.verdict.cause import Cause, Diagnosis
from equivcheck.recording.causes.candidate import Candidate
from equivcheck.recording.causes.evidence import Evidence, Tensors, linear_combination
from equivcheck.recording.causes.update import Update
from equivcheck.recording.compare.runs import RecordedRun
from equivcheck.recording.compare.settings import IMPLEMENTATION, parameter_groups
from equivcheck.recording.trace import Moment

Settings = Mapping[str, Any]
"""A parameter group's settings. Settings that are not numbers or strings are kept as printed."""
Pair = tuple[Settings, Settings]
"""A parameter group's settings in the first run and in the second run."""
NO_MISTAKES = (*IMPLEMENTATION, "optimizer", "initial_lr", "params")
"""Settings that change no value, and the optimizer's class, which a wrapper may change."""
SAME_CLASS = {"Adam", "AdamW"}
"""Classes that differ by the setting ``decoupled_weight_decay`` only."""


def groups_at(run: RecordedRun, step: int) -> list[Settings]:
    """Return the settings of each parameter group in a step. Equal groups on several ranks count once."""
    return [{name: _value(text) for name, text in group.items()} for group in parameter_groups(run, step)]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def pairs_at(evidence: Evidence, step: int) -> list[Pair]:
    """Return pairs of parameter groups, one from each run, that may belong together.

    Groups are paired in order. If one run has more groups, all pairs are returned.
    """
    one, other = (groups_at(run, step) for run in (evidence.first, evidence.second))
    if len(one) == len(other):
        return list(zip(one, other, strict=True))
    return [(mine, yours) for mine in one for yours in other]


def differing(pair: Pair) -> list[str]:
    """Return the names of settings that differ in a pair of parameter groups, one from each run.

    Settings without an effect on values are left out.
    """
    one, other = pair
    return [name for name in one if name in other and one[name] != other[name] and name not in NO_MISTAKES]


def has_linear_decay(settings: Settings) -> bool:
    """Whether the optimizer applies weight decay by subtracting a multiple of the parameter, as AdamW and SGD do."""
    return settings.get("optimizer") in ("AdamW", "SGD") or settings.get("decoupled_weight_decay") is True


def number(settings: Settings, name: str) -> float:
    """Return the setting `name` as a number, or 0 if it is not a number."""
    value = settings.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def other_settings(update: Update, pairs: Sequence[Pair]) -> Iterator[Candidate]:
    """Yield the mistake that the second run's optimizer has other settings.

    Only settings with a linear effect on the update are tried: learning rate, weight decay, or SGD's momentum.
    """
    names = list(dict.fromkeys(name for pair in pairs for name in differing(pair)))
    if not names:
        return
    cause, words = _describe(update.evidence, pairs, names)
    if set(names) <= {"lr", "weight_decay"}:
        yield update.candidate(cause, words, [_moves(update, pair) for pair in pairs])
    elif names == ["momentum"] and update.earlier:
        change = [number(other, "momentum") - number(one, "momentum") for one, other in pairs]
        moves = [linear_combination((1.0, update.moved), (factor, update.earlier)) for factor in change]
        yield update.candidate(cause, words, moves, size=1.0 + max(map(abs, change)))


def _moves(update: Update, pair: Pair) -> Tensors:
    (rate, decay), (new_rate, new_decay) = ((number(each, "lr"), number(each, "weight_decay")) for each in pair)
    factor = new_rate / rate if rate else 1.0
    is_linear = has_linear_decay(pair[0])
    own = factor * rate * decay - new_rate * new_decay if is_linear else 0.0
    return linear_combination((factor, update.moved), (own, update.before))


def _describe(evidence: Evidence, pairs: Sequence[Pair], names: Sequence[str]) -> tuple[Cause, str]:
    changes = {
        name: dict.fromkeys((one[name], other[name]) for one, other in pairs if name in differing((one, other))) for name in names
    }
    texts = [f"{name} is {_show(wrong)}, not {_show(right)}" for name, own in changes.items() for right, wrong in own]
    schedule = _schedule(evidence) if names == ["lr"] else ""
    if evidence.step > evidence.first.steps[0] and not any(differing(pair) for pair in pairs_at(evidence, evidence.step - 1)):
        cause = Cause.SCHEDULE if names == ["lr"] else Cause.HYPERPARAMETER
        return cause, f"at step {evidence.step}, {join_words(texts)}{schedule and ': '}{schedule}"
    if schedule:
        return Cause.SCHEDULE, f"{join_words(texts)}: {schedule}"
    cause = Cause.DECAY_COUPLED if names == ["decoupled_weight_decay"] else Cause.HYPERPARAMETER
    if names == ["weight_decay"]:
        decays = {number(one, "weight_decay") for one, _ in pairs}
        pair = changes["weight_decay"]
        cause = Cause.DECAY_EVERYWHERE if all(wrong in decays for _, wrong in pair) else cause
        cause = Cause.DECAY_TWICE if all(wrong == 2 * right for right, wrong in pair) else cause
    times = ""
    if names == ["lr"] and len(changes["lr"]) == 1:
        right, wrong = next(iter(changes["lr"]))
        times = f" ({wrong / right:.4g} times)" if right and wrong else ""
    return cause, f"the optimizer runs with wrong settings: {join_words(texts)}{times}"


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _schedule(evidence: Evidence) -> str:
    """Describe the learning rates over all steps, if all groups have the same one."""
    steps = [step for step in evidence.first.steps if step in evidence.second.steps]
    runs = (evidence.first, evidence.second)
    rates = [[{group.get("lr") for group in groups_at(run, step)} for step in steps] for run in runs]
    if any(len(own) != 1 for found in rates for own in found):
        return ""
    expected, actual = ([own.pop() for own in found] for found in rates)
    return describe_schedule(expected, actual, lambda _times: "")


def differing_settings(evidence: Evidence) -> Diagnosis | None:
    """Name optimizer settings that differ in the second run, if their effect on the update is not linear.

    The sketches cannot prove that these settings are the cause.
    """
    pairs = pairs_at(evidence, evidence.step)
    if evidence.moment in (Moment.UPDATE, Moment.STATE) and (other := _other_class(pairs)):
        return Diagnosis(cause=Cause.HYPERPARAMETER, sentence=f"the optimizer is {other[1]}, not {other[0]}", exact=False)
    names = list(dict.fromkeys(name for pair in pairs for name in differing(pair)))
    linear = {"lr", "weight_decay"} if all(has_linear_decay(one) for one, _ in pairs) else {"lr"}
    if evidence.moment not in (Moment.UPDATE, Moment.STATE) or not names or set(names) & linear:
        return None
    cause, sentence = _describe(evidence, pairs, names)
    return Diagnosis(cause=cause, sentence=sentence, exact=False)


def _other_class(pairs: Sequence[Pair]) -> tuple[str, str] | None:
    """Classes of both runs' optimizers, if each run has one of torch's, and both compute different updates."""
    found = {(str(one.get("optimizer")), str(other.get("optimizer"))) for one, other in pairs}
    classes = found.pop() if len(found) == 1 else ("", "")
    is_known = all(isinstance(getattr(torch.optim, name, None), type) for name in classes)
    return classes if is_known and classes[0] != classes[1] and {*classes} != SAME_CLASS else None
