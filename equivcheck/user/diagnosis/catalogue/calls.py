"""Mistakes in a step's calls: forward passes that run again, `zero_grad` without effect, and updates inside backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.words import count_description
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.traces.optimizers import optimizers_in
from equivcheck.worlds.trace.differences import Phase


def repeated_forwards(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield possible mistakes: ranks run a module's forward several times for each run on one device.

    Two modules are tried: the outermost module that ranks call more often than one device does, and its parent.
    """
    repeated = diverged.repeated_module()
    if repeated is None:
        return
    name, times = repeated
    for owner in dict.fromkeys((name.rpartition(".")[0], name)):
        who = f"`{owner}`" if owner else "the model"
        words = (
            f"the forward of {who} runs {times} times for each call on one device, and changes buffers each time, as with "
            "activation checkpointing, which runs it again in backward"
        )
        yield Mistake(Cause.FORWARD_REPEATED, words, partial(_repeat, name=owner, times=times), is_quick=True)


def _repeat(ranks: EmulatedUserRanks, *, name: str, times: int) -> None:
    for model in ranks.models:
        module: Any = model.get_submodule(name)
        module.forward = partial(_forward_again, module.forward, times)


def _forward_again(forward: Callable[..., Any], times: int, *inputs: Any, **keywords: Any) -> Any:
    outputs = forward(*inputs, **keywords)
    with torch.no_grad():
        for _ in range(times - 1):
            forward(*inputs, **keywords)
    return outputs


ORDINALS = ("first", "second", "third", "fourth")
"""Names for calls, in order."""


def skipped_zeroing(_diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield possible mistakes: one of several `zero_grad` calls in each step has no effect. Each call is tried."""
    for number, name in enumerate(ORDINALS if facts.num_backward > 1 else ()):
        words = f"gradients are not zeroed at the {name} `zero_grad` of each step: the next backward pass adds to older gradients"
        yield Mistake(Cause.NOT_ZEROED, words, partial(_skip_zeroing, number=number), is_quick=True)


def _skip_zeroing(ranks: EmulatedUserRanks, *, number: int) -> None:
    """In each step, ignore one `zero_grad` call on the model or an optimizer."""
    counts = [0] * len(ranks.models)

    def begin(rank: int, _step: int) -> None:
        counts[rank] = 0

    def skip(rank: int, owner: Any) -> None:
        own = owner.zero_grad

        def zero_grad(*arguments: Any, **keywords: Any) -> None:
            counts[rank] += 1
            if counts[rank] - 1 != number:
                own(*arguments, **keywords)

        owner.zero_grad = zero_grad

    def skip_in_optimizers(rank: int, optimizer: Any) -> None:
        for each in optimizers_in(optimizer):
            skip(rank, each)

    ranks.before_step.append(begin)
    ranks.built.append(skip_in_optimizers)
    for rank, model in enumerate(ranks.models):
        skip(rank, model)


def wrong_in_backward(diverged: DivergedTraining, facts: StepFacts) -> Iterator[Mistake]:
    """Yield possible mistakes: gradients are scaled, or not reduced, before an optimizer uses them inside backward."""
    if not facts.updates_in_backward:
        return
    ratio = diverged.ratio(diverged.updated, Phase.GRADIENT)
    if ratio is not None:
        words = f"all gradients are {ratio:g} times as large as on one device{count_description(diverged, ratio)}"
        yield Mistake(Cause.SCALED, words, partial(_scale_gradients, factor=ratio), is_quick=True)
    if diverged.has_own_rows:
        where = diverged.ranks_text(diverged.data_axes)
        words = f"all gradients are left unreduced over {where}: each rank updates inside backward, with those of its own rows"
        yield Mistake(Cause.NOT_REDUCED, words, _keep_own, own_rows=True)


def _scale_gradients(ranks: EmulatedUserRanks, *, factor: float) -> None:
    """Scale the gradient of the loss, but not the loss."""

    def loss_with_factor(outputs: Any, targets: Any, *, loss: Any) -> Any:
        value = loss(outputs, targets)
        return factor * value + ((1 - factor) * value).detach()

    ranks.wraps_loss = lambda _rank, loss: partial(loss_with_factor, loss=loss)


def _keep_own(ranks: EmulatedUserRanks) -> None:
    ranks.may_update_in_backward = True
