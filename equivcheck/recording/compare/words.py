"""Sentences for verdicts on two recorded runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equivcheck.diagnosis.words import join_words, name_ranks
from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.recording.compare.facts import Facts, Gap
from equivcheck.recording.compare.judge import CLUES
from equivcheck.recording.compare.settings import OtherSetting, other_environment
from equivcheck.recording.compare.tensors import GRADIENTS
from equivcheck.recording.compare.verdict import Group, TensorDifference
from equivcheck.recording.compare.weights import num_rounded, other_start
from equivcheck.recording.trace import Moment
from equivcheck.scenario.scenario import count
from equivcheck.worlds.trace.differences import Difference

_NOUNS = {
    Moment.START: ("initial parameter", ""),
    Moment.OUTPUT: ("module output", ""),
    Moment.UNCLIPPED: ("gradient", " before clipping"),
    Moment.GRADIENT: ("gradient", ""),
    Moment.UPDATE: ("parameter", " after the update"),
    Moment.STATE: ("optimizer state tensor", ""),
    Moment.BUFFER: ("buffer", ""),
}
"""For each point in a step: a noun for the tensors recorded there, and an addition to the sentence."""
_HINTS = {
    Moment.START: "load the same checkpoint in both runs, or set the same seed right before the model is built",
    Moment.SAMPLES: "give all ranks together the samples of A at each step: look at the sampler, its seed, and the batch size",
    Moment.OUTPUT: "look at this module: what it computes differs although the samples are the same",
    Moment.LOSS: "look at the means in the loss: over samples or tokens, over microbatches, and over ranks",
    Moment.UNCLIPPED: "look at the backward pass, and at how gradients are added up over microbatches and ranks",
    Moment.NORM: "look at the norm: it must be over all parameters and all their shards, with each replica counted once",
    Moment.GRADIENT: "look at the backward pass, and at how gradients are added up over microbatches and ranks",
    Moment.UPDATE: "look at the optimizer: its settings, its parameter groups, and what changes parameters after it",
    Moment.STATE: "look at the optimizer state: how it is sharded, loaded or reset",
    Moment.BUFFER: "look at the buffers: whether ranks update them with their own samples only",
}
"""The next thing to try, by the first point in a step that differs."""


def headline(first: TensorDifference, differences: Sequence[TensorDifference], groups: Sequence[Group], facts: Facts) -> str:
    """Return the verdict's first sentence: the tensors that differ first, and their step."""
    group = next(each for each in groups if (each.step, each.moment) == (first.step, first.moment))
    if first.moment in CLUES:
        return _clue(first)
    noun, addition = _NOUNS[first.moment]
    verb = "cannot be compared" if first.is_undecided else "differs" if group.num_different == 1 else "differ"
    text = f"{group.num_different} of {count(group.num_compared, noun)}{addition} {verb}"
    text += f": {first.detail}" if first.difference is not Difference.VALUE else ""
    if first.moment is Moment.START:
        own = [each for each in differences if each.moment is Moment.START]
        return "; ".join(filter(None, (f"another start: {text}", other_start(own, facts.first, facts.second))))
    settings = [str(each) for each in facts.settings if _concerns(each, first)]
    return "; ".join([f"at step {first.step}, {text}", *settings])


def _clue(found: TensorDifference) -> str:
    """Return a clause about samples, an output, a loss or a norm."""
    words = {
        Moment.SAMPLES: found.detail,
        Moment.OUTPUT: f"the output of {found.tensor} differs",
        Moment.LOSS: f"the loss is {found.detail}",
        Moment.NORM: f"the gradient norm is {found.detail}",
    }
    return f"at step {found.step}, {words[found.moment]}"


def _concerns(setting: OtherSetting, first: TensorDifference) -> bool:
    """Whether a setting has an effect at the first point in a step that differs."""
    moment = Moment.GRADIENT if setting.name == "max_norm" else Moment.UPDATE
    return setting.may_explain and first.moment is moment and setting.step <= first.step


def agreeing(compared: Sequence[TensorDifference], first: TensorDifference, facts: Facts) -> str:
    """Return a clause about the values that agree before the first difference."""
    order = list(Moment)
    place = (first.step, order.index(first.moment))
    before = [each for each in compared if (each.step, order.index(each.moment)) < place and not each.is_different]
    steps = sorted({each.step for each in before} - {first.step})
    found = [count(len(steps), "step")] if steps else []
    for moment in Moment:
        number = sum(each.moment is moment and each.step == first.step for each in before)
        if moment is Moment.SAMPLES and number:
            samples = facts.samples[first.step]
            found += [] if samples is None else [count(samples.num_samples[0], "sample")]
        elif moment is Moment.LOSS and number:
            losses = facts.losses[first.step]
            found += [] if losses is None or losses.factor else ["the loss"]
        elif moment is Moment.NORM and number:
            found.append("the gradient norm")
        elif number:
            noun, addition = _NOUNS[moment]
            found.append(f"{count(number, noun)}{addition}")
    return f"before it, {join_words(found)} agree{'s' if found in (['the loss'], ['1 step']) else ''}" if found else ""


def notes_of(facts: Facts, compared: Sequence[TensorDifference], differences: Sequence[TensorDifference]) -> Iterator[str]:
    """Yield clauses about differences that do not affect the outcome, such as other library versions."""
    yield from (f"at step {each.step}, {each}" for each in facts.settings)
    yield from other_environment(*facts.runs)
    for run in facts.runs:
        headers = [rank.header for rank in run.ranks]
        for note in dict.fromkeys(note for header in headers for note in header.notes):
            own = [header.rank for header in headers if note in header.notes]
            yield f"in {run.name}, {note}" if len(own) == len(headers) else f"on {name_ranks(own)} of {run.name}, {note}"
    wrong = [each.tensor for each in differences if each.moment is Moment.START]
    if number := num_rounded(*facts.runs, wrong):
        yield f"{count(number, 'initial parameter')} differ{'s' if number == 1 else ''} by rounding"
    listed = {(each.step, each.moment) for each in differences}
    last = differences[0].step if differences else facts.steps[-1]
    for moment in CLUES:
        clues = [each for each in compared if each.moment is moment and each.is_different and (each.step, moment) not in listed]
        yield from map(_clue, clues[:1])
    factors = [(step, losses.factor) for step, losses in facts.losses.items() if losses is not None and losses.factor]
    yield from (f"at step {step}, {factor}" for step, factor in factors[:1] if step <= last)


def hint_for(outcome: Outcome, first: TensorDifference | None, gaps: Sequence[Gap], facts: Facts) -> str:
    """Return advice on the next thing to try, based on the first difference or the first gap."""
    if first is None:
        return gaps[0][1] if gaps else ""
    if outcome is Outcome.INCONCLUSIVE:
        measure = "rounding may explain it: record A again with --moved 1, and pass that folder with --moved"
        return "" if first.is_undecided else measure
    has_outputs = any(record.outputs for run in facts.runs for record in run.records[first.step])
    if first.moment in (Moment.LOSS, *GRADIENTS) and not has_outputs:
        return f"{_HINTS[first.moment]}. If you record both runs with --outputs, the first module that differs is named"
    return _HINTS[first.moment]
