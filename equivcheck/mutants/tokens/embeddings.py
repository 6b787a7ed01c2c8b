"""Wrong embeddings for tokens and positions, and untied heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from equivcheck.mutants.mutant import ONE_RANK, TWO_STEPS, fault
from equivcheck.mutants.needs import EVERYWHERE, all_of, has_next_step, is_eager
from equivcheck.mutants.parameter_use import FirstValues, TensorFunction, use_through, use_weight_through
from equivcheck.mutants.rank import rank_along, size_of
from equivcheck.mutants.tensor_parallel.plan import TENSOR_PARALLEL
from equivcheck.mutants.tokens.needs import held_modules, learns_positions, length_of, plan_of, shards_vocabulary
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ActivationSharding, Scenario
from equivcheck.scenario.mesh import TP
from equivcheck.training.setup import Setup

LookUp = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Function that looks up tokens, given a rank's embedding rows, the tokens, and the first row's token."""


def _has_padding(scenario: Scenario) -> bool:
    source = scenario.training.model.source
    return source is not None and source.padding is not None and not source.frozen


def _embeds_in_parts(scenario: Scenario) -> bool:
    plan = plan_of(scenario)
    if plan is None or plan.source_output is not ActivationSharding.ROWS or not learns_positions(scenario):
        return False
    return length_of(scenario) % scenario.layout.mesh.size(TP) == 0


@fault(layouts=EVERYWHERE, applies=all_of(is_eager, _has_padding), causes=(Cause.PADDING_TRAINED,), minimum=ONE_RANK)
def padding_row_trained(setup: Setup) -> None:
    """Bug: `padding_idx` is not set, so the padding row gets a gradient."""
    for module in setup.model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


@fault(layouts=TENSOR_PARALLEL, applies=_embeds_in_parts, causes=(Cause.POSITIONS,))
def learned_positions_counted_from_parts(setup: Setup) -> None:
    """Bug: learned positions restart at 0 in each sequence shard."""
    part = length_of_part(setup)
    _positions(setup).register_forward_pre_hook(lambda _module, inputs: (inputs[0] % part,), prepend=True)


def length_of_part(setup: Setup) -> int:
    """Return the number of positions in each rank's sequence shard."""
    return (setup.training.model.length or 1) // size_of(setup, TP)


def _positions(setup: Setup) -> nn.Module:
    """Return the position embedding; an unused module on a pipeline rank that has none."""
    found = getattr(setup.model, "positions", None)
    return found if isinstance(found, nn.Module) else nn.Identity()


@fault(layouts=TENSOR_PARALLEL, applies=all_of(shards_vocabulary, learns_positions), causes=(Cause.POSITIONS,))
def positions_added_on_every_rank(setup: Setup) -> None:
    """Bug: each tensor-parallel rank adds learned positions before the sum, so they count several times."""
    others = size_of(setup, TP) - 1
    _positions(setup).register_forward_hook(lambda _module, _inputs, outputs: outputs + others * outputs.detach())


@fault(layouts=TENSOR_PARALLEL, applies=shards_vocabulary, causes=(Cause.ANOTHER_ROW,))
def tokens_of_other_ranks_not_masked(setup: Setup) -> None:
    """Bug: each rank embeds other ranks' tokens as its own first row instead of zeros, because they are not masked."""
    _look_up(setup, _unmasked)


def _unmasked(rows: torch.Tensor, tokens: torch.Tensor, first: int) -> torch.Tensor:
    places = tokens - first
    is_own = (places >= 0) & (places < rows.shape[0])
    return functional.embedding(places.masked_fill(~is_own, 0), rows)


@fault(layouts=TENSOR_PARALLEL, applies=shards_vocabulary, causes=(Cause.OUTPUT_AVERAGED, Cause.ANOTHER_ROW))
def embedding_averaged_over_ranks(setup: Setup) -> None:
    """Bug: vocabulary-parallel embeddings are averaged over ranks instead of summed."""
    _look_up(setup, partial(_share, size_of(setup, TP)))


def _share(ranks: int, rows: torch.Tensor, tokens: torch.Tensor, first: int) -> torch.Tensor:
    places = tokens - first
    is_own = (places >= 0) & (places < rows.shape[0])
    return functional.embedding(places.masked_fill(~is_own, 0), rows) * is_own.unsqueeze(-1) / ranks


def _look_up(setup: Setup, look_up: LookUp) -> None:
    """Replace each rank's lookup; the reduction stays unchanged."""
    module = getattr(setup.model, "embedding", None)
    if isinstance(module, nn.Embedding) and isinstance(module.weight, DTensor):
        vocabulary, rank = module.num_embeddings, rank_along(setup, TP)
        first = rank * -(-vocabulary // size_of(setup, TP))
        module.forward = partial(_sum_of, module, look_up, first)  # type: ignore[method-assign]


def _sum_of(module: nn.Embedding, look_up: LookUp, first: int, tokens: Any) -> torch.Tensor:
    weight: Any = module.weight
    own = tokens.to_local()
    found = look_up(weight.to_local(), own, first)
    if module.padding_idx is not None:
        found = found.where((own != module.padding_idx).unsqueeze(-1), found.detach())
    return DTensor.from_local(found, weight.device_mesh, [Partial()], run_check=False)


def _ties_trained(scenario: Scenario) -> bool:
    model = scenario.training.model
    return model.head is not None and model.head.tied and model.source is not None and not model.source.frozen


@fault(layouts=EVERYWHERE, applies=all_of(is_eager, _ties_trained), causes=(Cause.UNTIED,), minimum=ONE_RANK)
def tied_head_without_gradient(setup: Setup) -> None:
    """Bug: a tied head adds nothing to the embedding's gradient."""
    _use_head_through(setup, torch.Tensor.detach)


@fault(layouts=EVERYWHERE, applies=all_of(is_eager, _ties_trained), causes=(Cause.UNTIED,), minimum=ONE_RANK)
def tied_embedding_without_gradient(setup: Setup) -> None:
    """Bug: a tied embedding gets its gradient from the head only."""
    for embedding in held_modules(setup, "embedding"):
        use_through(embedding, torch.Tensor.detach)


@fault(
    layouts=EVERYWHERE,
    applies=all_of(is_eager, _ties_trained, has_next_step),
    causes=(Cause.UNTIED, Cause.STALE),
    minimum=TWO_STEPS,
)
def tied_head_stale(setup: Setup) -> None:
    """Bug: a tied head keeps the embedding's initial weight; gradients still go to the embedding."""
    _use_head_through(setup, FirstValues())


def _use_head_through(setup: Setup, through: TensorFunction) -> None:
    head = getattr(setup.model, "head", None)
    if head is not None:
        use_weight_through(head.linear, through)
