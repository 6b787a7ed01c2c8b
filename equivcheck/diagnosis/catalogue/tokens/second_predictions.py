"""Mistakes in heads that predict two tokens: the second prediction has wrong labels or a wrong count."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from equivcheck.diagnosis.catalogue.counterfactual import changing_batches, on_one_device
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import CrossEntropy
from equivcheck.training.documents import precedes_border
from equivcheck.training.labels import labels_two_ahead
from equivcheck.training.second_predictions import LabelsOf, relabel_second, weigh_second_as_first


def wrong_second_predictions(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in a head's second prediction, for the token after the next.

    The loss for this prediction is divided by the first prediction's label count, or uses another token's labels.
    """
    training, loss = diverged.training, diverged.training.loss
    if not training.model.predicts_two or not isinstance(loss, CrossEntropy):
        return
    if not loss.summed:
        words = "the loss of the second prediction is divided by the labels of the first"
        change = changing_batches(partial(weigh_second_as_first, training))
        yield on_one_device(Cause.LABEL_WEIGHTS, words, change)
    ways: list[tuple[str, LabelsOf]] = [("the labels of the first, for the next token", lambda labels: labels)]
    if training.model.packs_documents:
        none = precedes_border(training.model.length or 1, None)
        ways.append(("labels in the next document before each border", partial(labels_two_ahead, borders=none)))
    for what, second in ways:
        change = changing_batches(partial(relabel_second, training, second))
        yield on_one_device(Cause.ANOTHER_LABEL, f"the second prediction has {what}", change)
