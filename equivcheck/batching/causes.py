"""Explains why an arrangement differs: how the step weighs examples, or how examples and padding influence each other.

Weights are a cause only if they predict the gradients of every arrangement. If they do not, the model's outputs at each
example's own positions show whether the model or the loss is to blame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from equivcheck.arrangements.arrangement import Arrangement, Kind
from equivcheck.arrangements.fields import Role
from equivcheck.arrangements.format import Format
from equivcheck.arrangements.rows import Example, Rows, Side
from equivcheck.batching.by_output import cause_by_output
from equivcheck.batching.normalisers import Normaliser, Unit, candidates, fits, fits_within_example, measured_weights
from equivcheck.batching.runs import Runs
from equivcheck.scenario.scenario import count

_PLAIN = (Kind.WHOLE, Kind.SPLIT, Kind.BLANK, Kind.TWICE)
"""Kinds of arrangements without more padding or packing than the user's batch."""


def cause_of(runs: Runs, given: Format, window: int | None, shown: Sequence[Arrangement], wrong: Sequence[Arrangement]) -> str:
    """Explain why the arrangements in `wrong` differ from the whole batch. Returns an empty text if no explanation fits.

    An arrangement is one way to split, pad and pack the examples. `shown` are all arrangements that ran. `given` describes the
    batch's tensors. `window` is the number of microbatches in an update.
    """
    every = [runs.whole, *shown]
    if wrong and all(runs.only_loss_differs(each) for each in wrong):
        return "gradients and parameters agree: only the loss that your step returns differs"
    never = next((each for each in every if not each.ranks and runs.is_without_update(each)), None)
    if never is not None:
        return f"the optimizer makes no step with {count(len(never.microbatches), 'microbatch', 'microbatches')}"
    usual = runs.num_updates(runs.whole)
    often = next((each for each in wrong if not each.ranks and runs.num_updates(each) not in (None, 0, usual)), None)
    if usual and often is not None:
        steps, of = count(runs.num_updates(often) or 0, "step"), count(len(often.microbatches), "microbatch", "microbatches")
        return f"the optimizer makes {steps} with {of}, and {usual} with the whole batch in one"
    if wrong and all(each.kind is Kind.BLANK and runs.has_nan(each) for each in wrong):
        return "a microbatch without counted labels makes gradients NaN, such as a mean over no token"
    found = _normaliser(runs, every, window)
    if found is not None:
        words = f"{found.words(is_sum=runs.is_additive)}{_or_other(found, runs, given, every, window)}"
        return f"{words} (explains all {len(shown)} arrangements)"
    clauses = []
    twice = next((each for each in wrong if each.kind is Kind.TWICE and not each.ranks), None)
    if twice is not None and _grows_with_microbatches(runs, twice):
        clauses.append("each microbatch adds a loss term that is not divided by the number of microbatches")
    for kind, explain in ((Kind.PADDED, _of_padding), (Kind.PACKED, _of_packing)):
        place = next((each for each in wrong if each.kind is kind), None)
        if place is not None:
            clauses.append(explain(runs, given, place))
    split = [each for each in wrong if each.kind in _PLAIN and not each.ranks]
    if split:
        plain = [each for each in every if each.kind in _PLAIN and not each.ranks]
        found = _normaliser(runs, plain, window)
        if found is not None:
            words = f"{found.words(is_sum=runs.is_additive)}{_or_other(found, runs, given, plain, window)}"
            # The whole batch is in `plain`, but not counted: the verdict counts arrangements that it is compared with.
            clauses.append(f"{words} (explains all {len(plain) - 1} arrangements without more padding)")
        elif not any(clauses):  # padding that counts changes with the lengths of microbatches, so one cause is enough
            clauses.append(_of_split(runs, split[0], plain, window))
    if wrong and not any(clauses) and all(each.ranks for each in wrong):
        clauses.append(_of_ranks(runs, every, wrong, window))
    return "; ".join(filter(None, clauses))


def _normaliser(runs: Runs, arrangements: Sequence[Arrangement], window: int | None) -> Normaliser | None:
    """Return the first normaliser that predicts the gradients in all arrangements."""
    for each in candidates(window, has_ranks=any(one.ranks for one in arrangements)):
        if fits_within_example(each, runs, window) and all(fits(each, runs, one, window) for one in arrangements):
            return each
    return None


def _or_other(found: Normaliser, runs: Runs, given: Format, arrangements: Sequence[Arrangement], window: int | None) -> str:
    """Return a clause if a mean over examples predicts the same gradients as a mean over tokens, because counts are equal."""
    other = replace(found, unit=Unit.EXAMPLES)
    is_other = given.has_tokens and found.unit is Unit.TOKENS and all(fits(other, runs, one, window) for one in arrangements)
    return f", or {other}" if is_other else ""


def _grows_with_microbatches(runs: Runs, twice: Arrangement) -> bool:
    """Whether three copies of the batch change the gradients twice as much as two copies do."""
    once, two = runs.gradients(runs.whole), runs.gradients(twice)
    thrice = replace(twice, microbatches=twice.microbatches[:1] * 3)
    return runs.fits(runs.gradients(thrice), once + 2.0 * (two - once))


def _of_ranks(runs: Runs, every: Sequence[Arrangement], wrong: Sequence[Arrangement], window: int | None) -> str:
    """Say how the step on ranks weighs examples, if all arrangements on one device agree."""
    local = [runs.local_gradients(each) for each in wrong]
    if local[0] and any((each != local[0][0]).any() for each in local[0]):
        for name, combine in (("mean", np.mean), ("sum", np.sum)):
            if all(runs.would_be_right(combine(own, axis=0), each) for own, each in zip(local, wrong, strict=True)):
                return f"gradients are not reduced: their {name} over ranks would be right"
    on_one = _normaliser(runs, [each for each in every if not each.ranks], window)
    if on_one is None:
        return ""
    on_ranks = [each for each in every if each.ranks]
    for found in candidates(window, has_ranks=True):
        if all(fits(found, runs, each, window, on_one) for each in on_ranks):
            return f"on ranks the step is the {found} (explains all {len(on_ranks)} arrangements on ranks)"
    return ""


def _of_split(runs: Runs, place: Arrangement, plain: Sequence[Arrangement], window: int | None) -> str:
    differ = runs.outputs_differ(place, runs.whole)
    if differ is None:
        return ""
    if differ:
        return _in_model(runs)
    by_output = cause_by_output(runs, plain, window)
    if by_output:
        return by_output
    return _NO_WEIGHTS if measured_weights(runs, place) is None else ""


def _in_model(runs: Runs) -> str:
    norms = [name for name, module in runs.build().named_modules() if isinstance(module, _BATCH_NORMS)]
    about = f": {norms[0]!r} normalises over a microbatch's rows" if norms else ""
    return f"rows in a microbatch influence each other in the model{about}"


def _of_padding(runs: Runs, given: Format, place: Arrangement) -> str:
    differ = runs.outputs_differ(place, runs.whole)
    if differ is None:
        return ""
    (rows,) = place.microbatches
    if not differ:
        return _of_padding_in_loss(runs, given, place, rows)
    if runs.outputs_differ(_each_row_by_itself(place, rows), place):
        return _in_model(runs)
    other = replace(place, microbatches=(replace(rows, pad_id=_other_token(given, rows.examples)),))
    if runs.outputs_differ(place, other):
        return f"the model attends to padding, or finds it by its token: {_BY_TOKEN}"
    return "positions count padding: the model's outputs at other positions change with the amount of padding, not with its token"


def _each_row_by_itself(place: Arrangement, rows: Rows) -> Arrangement:
    """Return an arrangement with each row in its own microbatch, and with the same length as before."""
    alone = [replace(rows, rows=(row,), extra=rows.length - sum(example.length for example in row)) for row in rows.rows]
    return replace(place, microbatches=tuple(alone))


def _of_padding_in_loss(runs: Runs, given: Format, place: Arrangement, rows: Rows) -> str:
    if rows.side is Side.LEFT and _predicts_from_padding(runs, given, rows):
        return f"{_FROM_PADDING} an example's first token counts, although padding predicts it"
    found = runs.observation(place)
    before, inside = runs.observation(runs.whole), [bool(each) for each in found.padding]
    if not found.names or found.names != before.names:
        return f"{_PADDING}: {_AGREE_THERE}"
    if not any(inside):
        return f"the loss divides by a number that depends on padding: {_AGREE_THERE}, and padding has no gradients"
    name = f", in output {found.names[inside.index(True)]}" if len(inside) > 1 and not all(inside) else ""
    nearest = max(distance for each in found.padding for distance in each)
    longer = replace(place, microbatches=(replace(rows, extra=nearest + 1),))
    if rows.side is Side.LEFT and nearest and runs.observation(longer).padding == found.padding:
        return f"{_FROM_PADDING} an example's first tokens counts{name}, although padding predicts them"
    return f"{_PADDING}{name}: {_AGREE_THERE}"


def _predicts_from_padding(runs: Runs, given: Format, rows: Rows) -> bool:
    """Whether padding on the left changes nothing if first labels do not count."""
    examples = [given.without_first_label(example) for example in rows.examples]
    alone = tuple((example,) for example in examples)
    both = [replace(rows, rows=alone, side=side) for side in (Side.RIGHT, Side.LEFT)]
    right, left = (Arrangement(name="padded", kind=Kind.PADDED, microbatches=(each,)) for each in both)
    return runs.fits(runs.gradients(left), runs.gradients(right))


def _of_packing(runs: Runs, given: Format, place: Arrangement) -> str:
    differ = runs.outputs_differ(place, runs.whole)
    if differ is None:
        return ""
    row = next(row for rows in place.microbatches for row in rows.rows if len(row) > 1)
    if not differ:
        return _of_packed_loss(runs, given, place, row)
    changed = given.with_tokens(row[0], _other_token(given, row))
    if runs.outputs_differ(_packed(row), _packed((changed, *row[1:]))):
        return "packed documents attend to each other: a document's outputs depend on the tokens in the one before"
    return "positions run on in packed documents: a document's outputs depend on the length of the one before, not on its tokens"


def _of_packed_loss(runs: Runs, given: Format, place: Arrangement, row: Sequence[Example]) -> str:
    """Say how packing changes the loss if the model's outputs agree.

    If only the first document has labels, gradients must equal those of this document by itself.
    """
    others = [given.without_labels(example) for example in row[1:]]
    name = _output_over_boundary(runs, place)
    has_single_output = len(runs.observation(place).names) < 2
    has_no_labels = not any(example.num_counted for example in others)
    if has_single_output and has_no_labels and measured_weights(runs, _packed((row[0], *others))) is None:
        return f"{_BOUNDARY}: the document before predicts the next one's first token"
    if name is not None:
        of = "" if has_single_output else f" in output {name}"
        return f"{_BOUNDARY}{of}: a document's last positions have gradients if another one follows"
    return "the loss counts packed documents in another way: the model's outputs agree"


def _output_over_boundary(runs: Runs, place: Arrangement) -> str | None:
    """Return the name of an output that has gradients at a document's last positions only if another document follows.

    None if there is none.
    """
    packed, whole = runs.observation(place), runs.observation(runs.whole)
    if packed.names != whole.names:
        return None
    for number, name in enumerate(whole.names):
        for key, gradients in whole.gradients.items():
            alone, together = (each.flatten(1).abs().sum(1) != 0 for each in (gradients[number], packed.gradients[key][number]))
            more = torch.nonzero(together & ~alone).flatten()
            if len(more) and int(more[-1]) == len(alone) - 1:
                return name
    return None


def _other_token(given: Format, examples: Sequence[Example]) -> int:
    """Return a token of the batch that is not the padding token."""
    tokens = given.field_with(Role.TOKENS)
    assert tokens is not None
    values = torch.cat([example.values[tokens] for example in examples])
    return int(values[values != given.pad_id].max()) if bool((values != given.pad_id).any()) else given.pad_id


def _packed(row: Sequence[Example]) -> Arrangement:
    return Arrangement(name="packed", kind=Kind.PACKED, microbatches=(Rows(rows=(tuple(row),)),))


_FROM_PADDING = "with padding on the left, the label of"
_PADDING = "padding counts in the loss"
_AGREE_THERE = "the model's outputs at all other positions agree"
_BOUNDARY = "a label across the boundary of packed documents counts"
_BY_TOKEN = "its outputs at other positions depend on the token in the padding"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NO_WEIGHTS = (
    "the model's outputs agree, but no weights per example explain the gradients: rows in a microbatch share a loss term, "
    "or the loss has parts with different normalisers"
)
