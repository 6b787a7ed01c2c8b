"""Mistakes in token and position embeddings, and in tied heads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from equivcheck.diagnosis.catalogue.counterfactual import on_one_device, submodule
from equivcheck.diagnosis.catalogue.shared_weights import detached_weight, initial_weight, using_weight
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.mistakes.embeddings import look_up, wrong_lookups
from equivcheck.layouts.base.limits.repairs import is_tied
from equivcheck.layouts.base.partition import chunk_size
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Tokens
from equivcheck.scenario.mesh import TP
from equivcheck.training.setup import Setup


def wrong_embeddings(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in embeddings: a gradient for padding, wrong positions, wrong rows for tokens, or an untied head."""
    source = diverged.training.model.source
    if source is None or diverged.rounding is not None:
        return
    if source.padding is not None:
        words = "the padding row of `embedding.weight` has a gradient, as if `padding_idx` were not set"
        yield on_one_device(Cause.PADDING_TRAINED, words, _forget_padding)
    if diverged.mesh.size(TP) > 1:
        yield from _positions(diverged, source)
        yield from _rows(diverged, source)
    if is_tied(diverged.training.model):
        yield from _untied()


def _forget_padding(setup: Setup) -> None:
    _embedding(setup).padding_idx = None


def _embedding(setup: Setup, name: str = "embedding") -> nn.Embedding:
    return submodule(setup, name, nn.Embedding)


def _positions(diverged: DivergedRun, source: Tokens) -> Iterator[Mistake]:
    ranks, length = diverged.mesh.size(TP), diverged.training.model.length or 1
    where = diverged.ranks_text((TP,))
    if not source.learned_positions:
        return
    if length % ranks == 0:
        words = f"learned positions restart in each sequence shard on {where}"
        yield on_one_device(Cause.POSITIONS, words, partial(_begin_anew, part=length // ranks))
    for learns in (False, True):
        words = f"learned positions are added on each of {where}, not once"
        yield on_one_device(Cause.POSITIONS, words, partial(_add_again, times=ranks - 1, learns=learns))


def _begin_anew(setup: Setup, *, part: int) -> None:
    _embedding(setup, "positions").register_forward_pre_hook(lambda _module, inputs: (inputs[0] % part,))


def _add_again(setup: Setup, *, times: int, learns: bool) -> None:
    def add(_module: nn.Module, _inputs: object, outputs: torch.Tensor) -> torch.Tensor:
        return outputs + times * (outputs if learns else outputs.detach())

    _embedding(setup, "positions").register_forward_hook(add)


def _rows(diverged: DivergedRun, source: Tokens) -> Iterator[Mistake]:
    """Yield faults in a row-sharded embedding."""
    ranks, where = diverged.mesh.size(TP), diverged.ranks_text((TP,))
    words = f"the rows of `embedding.weight` that {where} look up are averaged over them, not summed"
    yield on_one_device(Cause.OUTPUT_AVERAGED, words, partial(_divide, ranks=ranks))
    shards = torch.split(torch.arange(source.vocabulary), chunk_size(source.vocabulary, ranks))
    for words, rows in wrong_lookups(shards, "embedding.weight", where):
        yield on_one_device(Cause.ANOTHER_ROW, words, partial(_look_up, rows=rows))


def _divide(setup: Setup, *, ranks: int) -> None:
    _embedding(setup).register_forward_hook(lambda _module, _inputs, outputs: outputs / ranks)


def _look_up(setup: Setup, *, rows: torch.Tensor) -> None:
    module = _embedding(setup)
    module.forward = partial(look_up, module, rows)  # type: ignore[method-assign]


def _untied() -> Iterator[Mistake]:
    words = "the use of the tied `embedding.weight` in the head adds nothing to its gradient"
    yield on_one_device(Cause.UNTIED, words, using_weight(("head.linear",), detached_weight))
    words = "the use of the tied `embedding.weight` in the embedding adds nothing to its gradient"
    yield on_one_device(Cause.UNTIED, words, _embed_without_gradient)
    words = "the tied `embedding.weight` keeps its initial value in the head"
    yield on_one_device(Cause.UNTIED, words, using_weight(("head.linear",), initial_weight))


def _embed_without_gradient(setup: Setup) -> None:
    module = _embedding(setup)
    module.forward = lambda tokens: functional.embedding(tokens, module.weight.detach())  # type: ignore[assignment,method-assign]
