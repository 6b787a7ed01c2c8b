"""What tokens and their positions are embedded as: padding that learns, positions of parts, rows of other tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from equivcheck.mutants.mutant import Minimum, fault
from equivcheck.mutants.needs import EVERYWHERE, all_of, is_eager
from equivcheck.mutants.rank import rank_along, size_of
from equivcheck.mutants.tensor_parallel.plan import WITH_A_PLAN
from equivcheck.mutants.tokens.needs import length_of, plan_of, shares_out_vocabulary
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import ActivationSharding, Scenario
from equivcheck.scenario.mesh import TP
from equivcheck.training.setup import Setup

LookUp = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""From a rank's rows of an embedding, tokens, and the token of the first of its rows: what it adds for each token."""


def _has_padding(scenario: Scenario) -> bool:
    source = scenario.training.model.source
    return source is not None and source.padding is not None and not source.frozen


def _learns_positions(scenario: Scenario) -> bool:
    source = scenario.training.model.source
    return source is not None and source.learned_positions


def _embeds_in_parts(scenario: Scenario) -> bool:
    plan = plan_of(scenario)
    if plan is None or plan.source_output is not ActivationSharding.ROWS or not _learns_positions(scenario):
        return False
    return length_of(scenario) % scenario.layout.mesh.size(TP) == 0


@fault(
    layouts=EVERYWHERE,
    applies=all_of(is_eager, _has_padding),
    causes=(Cause.PADDING_TRAINED,),
    minimum=Minimum(ranks=1, because="the row of one rank learns as well"),
)
def padding_row_trained(setup: Setup) -> None:
    """The embedding has forgotten its padding token, whose row gets a gradient."""
    for module in setup.model.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None


@fault(
    layouts=WITH_A_PLAN,
    applies=_embeds_in_parts,
    causes=(Cause.POSITIONS,),
    minimum=Minimum(because="of two parts of a sequence the second counts from the start"),
)
def learned_positions_counted_from_parts(setup: Setup) -> None:
    """Learned positions begin anew in each rank's part of a sequence."""
    part = length_of_part(setup)
    _positions(setup).register_forward_pre_hook(lambda _module, inputs: (inputs[0] % part,), prepend=True)


def length_of_part(setup: Setup) -> int:
    """Positions of each rank's part of a sequence."""
    return (setup.training.model.length or 1) // size_of(setup, TP)


def _positions(setup: Setup) -> nn.Module:
    """What positions are embedded by; anything, and called by nobody, on a rank of a pipeline that embeds nothing."""
    found = getattr(setup.model, "positions", None)
    return found if isinstance(found, nn.Module) else nn.Identity()


@fault(
    layouts=WITH_A_PLAN,
    applies=all_of(shares_out_vocabulary, _learns_positions),
    causes=(Cause.POSITIONS,),
    minimum=Minimum(because="one rank adds them once"),
)
def positions_added_on_every_rank(setup: Setup) -> None:
    """Learned positions are added to each rank's share of the embedded tokens, and so summed over ranks."""
    others = size_of(setup, TP) - 1
    _positions(setup).register_forward_hook(lambda _module, _inputs, outputs: outputs + others * outputs.detach())


@fault(
    layouts=WITH_A_PLAN,
    applies=shares_out_vocabulary,
    causes=(Cause.ANOTHER_ROW,),
    minimum=Minimum(because="one rank has all rows"),
)
def tokens_of_other_ranks_not_masked(setup: Setup) -> None:
    """Each rank looks up tokens of other ranks in the first of its own rows, and does not leave them out of the sum."""
    _look_up(setup, _unmasked)


def _unmasked(rows: torch.Tensor, tokens: torch.Tensor, first: int) -> torch.Tensor:
    places = tokens - first
    is_own = (places >= 0) & (places < rows.shape[0])
    return functional.embedding(places.masked_fill(~is_own, 0), rows)


@fault(
    layouts=WITH_A_PLAN,
    applies=shares_out_vocabulary,
    causes=(Cause.OUTPUT_AVERAGED, Cause.ANOTHER_ROW),
    minimum=Minimum(because="over one rank, mean and sum are the same"),
)
def embedding_averaged_over_ranks(setup: Setup) -> None:
    """What ranks look up in their rows of the embedding is averaged over ranks, not summed."""
    _look_up(setup, partial(_share, size_of(setup, TP)))


def _share(ranks: int, rows: torch.Tensor, tokens: torch.Tensor, first: int) -> torch.Tensor:
    places = tokens - first
    is_own = (places >= 0) & (places < rows.shape[0])
    return functional.embedding(places.masked_fill(~is_own, 0), rows) * is_own.unsqueeze(-1) / ranks


def _look_up(setup: Setup, look_up: LookUp) -> None:
    """Let each rank look tokens up in its rows in another way; the sum over ranks is done as before."""
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
