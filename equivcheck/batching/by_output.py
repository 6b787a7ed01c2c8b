"""Finds how a step weighs each model output, if no weights per example explain the parameters' gradients.

If outputs agree in two arrangements, gradients at one position differ only by the loss's weight. All positions of an example
then have the same ratio. Outputs such as two heads may have different normalisers, each with its own count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from equivcheck.arrangements.arrangement import Arrangement, Kind
from equivcheck.arrangements.rows import Example, Rows
from equivcheck.batching.normalisers import Normaliser, Over, Unit, candidates
from equivcheck.batching.outputs import named_outputs
from equivcheck.batching.runs import Runs
from equivcheck.scenario.scenario import count
from equivcheck.worlds.trace.tensors import Vector

_MIN_INDEPENDENT = 5
"""Number of independent arrangements and gradient elements needed to prove a sum of two losses."""


def cause_by_output(runs: Runs, plain: Sequence[Arrangement], window: int | None) -> str:
    """Explain for each model output how much each example weighs in the output's gradients. Empty if no explanation fits.

    `plain` are arrangements (ways to split, pad and pack the batch) without additional padding. `window` is the number of
    microbatches in an update.
    """
    whole = runs.observation(runs.whole)
    shown = [each for each in plain if each is not runs.whole and not each.has_blank]
    observed = [runs.observation(each) for each in shown]
    if not whole.names or any(each.names != whole.names for each in observed):
        return ""
    ratios = [runs.ratios_by_output(each, runs.whole) for each in shown]
    if all(each is not None for each in ratios):
        return _of_ratios(runs, [each for each in ratios if each is not None], shown, window)
    return _of_two_parts(runs, [runs.whole, *shown], window)


def fits_by_output(runs: Runs, normaliser: Normaliser, window: int | None) -> bool:
    """Whether a normaliser predicts gradients at the model's outputs.

    The prediction scales gradients from steps on single examples. In each output, positions with a gradient count as tokens.
    Returns False if parameters also get gradients from a loss on tensors other than these outputs.
    """
    if not runs.observation(runs.whole).names or not _come_through_outputs(runs):
        return False
    pairs: list[tuple[Place, Place]] = [
        ((single, example), (runs.whole, example)) for example, single in zip(runs.examples, runs.singles, strict=True)
    ]
    if runs.halves is not None:
        one, *parts = runs.halves
        pairs += [((part, _only_example(part)), (one, _only_example(one))) for part in parts]
    return all(_fits_pair(runs, normaliser, window, *pair) for pair in pairs)


Place = tuple[Arrangement, Example]
"""An arrangement, and one example in it."""


def _fits_pair(runs: Runs, normaliser: Normaliser, window: int | None, one: Place, other: Place) -> bool:
    """Whether an example's gradients at counted positions have the ratio of its weights in two arrangements."""
    after, before = (runs.observation(arrangement) for arrangement, _ in (one, other))
    if after.names != before.names:
        return False
    for number, gradient in enumerate(after.gradients[id(one[1])]):
        all_of = before.gradients[id(other[1])][number]
        counted = gradient.flatten(1).abs().sum(1) != 0 if gradient.dim() > 1 else torch.ones((), dtype=torch.bool)
        base = (all_of * counted.view(-1, *[1] * (gradient.dim() - 1))).flatten()
        now, then = (_weight(runs, normaliser, window, place, number) for place in (one, other))
        distance = float((gradient.flatten() - now / then * base).norm())
        if not distance <= runs.rounding * float(gradient.norm()):  # also if it is NaN
            return False
    return True


def _weight(runs: Runs, normaliser: Normaliser, window: int | None, place: Place, number: int) -> float:
    """Return an example's weight, which is never 0, from the counts in one output."""
    arrangement, example = place
    gradients = runs.observation(arrangement).gradients
    examples = [each for rows in arrangement.microbatches for each in rows.examples]
    copies = {id(each): replace(each, num_counted=_num_positions(gradients[id(each)][number])) for each in examples}
    return normaliser.weights(_with_copies(arrangement, copies), window)[id(copies[id(example)])] or 1.0


def _only_example(arrangement: Arrangement) -> Example:
    ((example,),) = arrangement.microbatches[0].rows
    return example


def _of_ratios(runs: Runs, ratios: Sequence[Sequence[dict[int, float]]], shown: Sequence[Arrangement], window: int | None) -> str:
    """Say how the step weighs each output, if each example has one weight in each output."""
    names = runs.observation(runs.whole).names
    wrong: dict[str, list[str]] = {}
    for number, name in enumerate(names):
        own = [each[number] for each in ratios]
        if all(
            runs.is_one(value) for each, one in zip(own, shown, strict=True) if one.kind is Kind.SPLIT for value in each.values()
        ):
            continue
        found = _fitting(runs, number, own, shown, window)
        if found is None:
            return ""
        wrong.setdefault(str(found), []).append(name)
    if not wrong:
        return _beside_outputs(runs)
    clauses = []
    for words, outputs in wrong.items():
        label = f"{'outputs' if len(outputs) > 1 else 'output'} {', '.join(outputs)}: " if len(names) > 1 else ""
        clauses.append(f"{label}{words}")
    return f"{'; '.join(clauses)} (explains {_in(shown)})"


def _values_in_splits(ratios: Sequence[dict[int, float]], shown: Sequence[Arrangement]) -> Iterator[float]:
    for each, arrangement in zip(ratios, shown, strict=True):
        if arrangement.kind is Kind.SPLIT:
            yield from each.values()


def _beside_outputs(runs: Runs) -> str:
    """Say what differs if the gradients of the model's outputs agree."""
    come_through = _come_through_outputs(runs)
    if come_through is None:
        return ""
    if come_through:
        return "gradients of the model's outputs agree, but the step changes those of parameters after backward"
    return f"{_SHARED}, which is not computed from the model's outputs: the outputs' gradients agree"


def _come_through_outputs(runs: Runs) -> bool | None:
    """Whether output gradients give the parameter gradients, up to a factor such as clipping. None if this is unknown."""
    through_outputs, actual = _gradients_through_outputs(runs), runs.gradients(runs.whole)
    if through_outputs is None:
        return None
    factor = float(actual @ through_outputs) / (float(through_outputs @ through_outputs) or 1.0)
    return runs.fits(actual, factor * through_outputs)


def _gradients_through_outputs(runs: Runs) -> Vector | None:
    """Return parameter gradients, computed from output gradients in the whole batch. None if this is not possible."""
    watch, model, table = runs.watch(runs.whole), runs.build(), runs.gradient_moment.table
    watch.observation(runs.whole, runs.is_by_row)  # marks final outputs
    found = np.zeros(table.total)
    try:
        for (arguments, keywords), gradients in zip(watch.inputs, watch.gradients, strict=True):
            outputs = named_outputs(model(*arguments, **keywords))
            torch.autograd.backward([outputs[name] for name in gradients], list(gradients.values()))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                start = table.offsets[table.rows[name]]
                found[start : start + parameter.numel()] = parameter.grad.flatten().double().numpy()
    except (RuntimeError, TypeError, KeyError):
        return None
    return found


def _fitting(
    runs: Runs, number: int, ratios: Sequence[dict[int, float]], shown: Sequence[Arrangement], window: int | None
) -> Normaliser | None:
    """Return the first normaliser that explains all ratios with the output's own counts."""
    counts = {key: _num_positions(each[number]) for key, each in runs.observation(runs.whole).gradients.items()}
    copies = {id(each): replace(each, num_counted=counts[id(each)]) for each in runs.examples}
    whole = _with_copies(runs.whole, copies)
    others = [_with_copies(each, copies) for each in shown]
    for each in candidates(window):
        before = each.weights(whole, window)
        pairs = (
            (value, before[key], each.weights(other, window)[key])
            for own, other in zip(ratios, others, strict=True)
            for key, value in ((id(copies[example]), ratio) for example, ratio in own.items())
        )
        if all(value and one and runs.is_one(now / one / value) for value, one, now in pairs):
            return each
    return None


def _num_positions(gradient: torch.Tensor) -> int:
    return int((gradient.flatten(1).abs().sum(1) != 0).sum()) if gradient.dim() > 1 else 1


def _with_copies(arrangement: Arrangement, copies: dict[int, Example]) -> Arrangement:
    def copy_rows(rows: Rows) -> Rows:
        return replace(rows, rows=tuple(tuple(copies[id(each)] for each in row) for row in rows.rows))

    return replace(arrangement, microbatches=tuple(map(copy_rows, arrangement.microbatches)))


def _of_two_parts(runs: Runs, shown: Sequence[Arrangement], window: int | None) -> str:
    """Say which two normalisers explain output gradients as a sum with two terms. Empty if no two normalisers do."""
    gradients = [np.stack([_flat(runs, each, example) for each in shown]) for example in runs.examples]
    if min(min(each.shape) for each in gradients) < _MIN_INDEPENDENT or not all(np.isfinite(each).all() for each in gradients):
        return ""
    right = Normaliser(unit=Unit.TOKENS, over=Over.ALL)
    for other in candidates(window):
        weights = [
            (_weights(right, shown, example, window), _weights(other, shown, example, window)) for example in runs.examples
        ]
        if all(_spans(np.stack(pair, axis=1), own, runs.rounding) for pair, own in zip(weights, gradients, strict=True)):
            return f"two parts of the loss have different normalisers, and one is the {other} (explains {_in(shown)})"
    return ""


def _flat(runs: Runs, arrangement: Arrangement, example: Example) -> Vector:
    gradients = runs.observation(arrangement).gradients[id(example)]
    found: Vector = torch.cat([each.flatten() for each in gradients]).double().numpy()
    return found


def _weights(normaliser: Normaliser, shown: Sequence[Arrangement], example: Example, window: int | None) -> Vector:
    return np.array([normaliser.weights(each, window)[id(example)] for each in shown])


def _spans(weights: Vector, gradients: Vector, rounding: float) -> bool:
    """Whether two weights in each arrangement explain an example's gradients there."""
    terms = np.linalg.lstsq(weights, gradients, rcond=None)[0]
    return bool(np.linalg.norm(weights @ terms - gradients) <= rounding * np.linalg.norm(gradients))


def _in(shown: Sequence[Arrangement]) -> str:
    return f"the outputs' gradients in {count(len(shown), 'arrangement')}"


_SHARED = "rows in a microbatch share a loss term"
