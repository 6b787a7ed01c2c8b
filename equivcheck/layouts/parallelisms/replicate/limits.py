"""Limits for composable `replicate`."""

from __future__ import annotations

from dataclasses import replace

from equivcheck.layouts.base.limits.data_parallel import COMPILED_DDP, EVEN_ROWS, FSDP_WITHOUT_COMPILED_AUTOGRAD, ROUNDING_LIMITS
from equivcheck.layouts.base.limits.limit import LayoutLimit, Limit, UpstreamLimit, parallelism_of
from equivcheck.layouts.base.limits.optimizers import DTENSOR_OPTIMIZERS
from equivcheck.layouts.base.limits.repairs import (
    has_shares,
    may_skip_parameters,
    with_options,
    without_auxiliary,
    without_shares,
)
from equivcheck.layouts.parallelisms.ddp.limits import NO_BF16_HOOK, TRAINED_STAGES, as_reduced
from equivcheck.layouts.parallelisms.fsdp2.limits import NO_SCALARS as NO_SHARDED_SCALARS
from equivcheck.layouts.parallelisms.fsdp2.limits import NOTHING_REDUCED
from equivcheck.scenario import Replicate, Replicator, Wrapping


def _only(implementation: Replicator, limit: Limit) -> Limit:
    return replace(
        limit,
        applies=lambda training, layout: (
            parallelism_of(layout, Replicate).implementation is implementation and limit.applies(training, layout)
        ),
    )


COMPILED_AUTOGRAD_WITH_DDP_ONLY = replace(
    FSDP_WITHOUT_COMPILED_AUTOGRAD,
    applies=lambda layout: (
        parallelism_of(layout, Replicate).implementation is Replicator.FSDP and FSDP_WITHOUT_COMPILED_AUTOGRAD.applies(layout)
    ),
)

UNUSED_PARAMETERS = UpstreamLimit(
    reason="replicate: a trained parameter that does not take part in every step is not supported without "
    "find_unused_parameters: the reduction of its bucket does not finish",
    applies=lambda training, layout: may_skip_parameters(as_reduced(training, layout)),
    repair=lambda training, _layout: without_auxiliary(training),
)

ONE_UNIT_FOR_SHARED_WEIGHTS = UpstreamLimit(
    reason="replicate_with_fsdp: one unit per layer with layers that share a weight is not supported: such layers must be in "
    "one unit",
    applies=lambda training, layout: (
        parallelism_of(layout, Replicate).wrapping is Wrapping.PER_LAYER and has_shares(training.model)
    ),
    repair=lambda training, _layout: without_shares(training),
)

NO_SCALARS = UpstreamLimit(
    reason="replicate_with_fsdp: a scalar parameter (shape []) is not supported: fully_shard refuses it, although "
    "nothing is sharded ('fully_shard doesn't support scalar parameters')",
    applies=NO_SHARDED_SCALARS.applies,
    repair=NO_SHARDED_SCALARS.repair,
)

LIMITS: tuple[Limit, ...] = (
    EVEN_ROWS,
    _only(Replicator.DDP, UNUSED_PARAMETERS),
    _only(Replicator.DDP, TRAINED_STAGES),
    ONE_UNIT_FOR_SHARED_WEIGHTS,
    *(_only(Replicator.FSDP, limit) for limit in (NO_SCALARS, *NOTHING_REDUCED, *DTENSOR_OPTIMIZERS)),
)

NOT_YET_BY_FSDP = LayoutLimit(
    reason="replicate_with_fsdp: this version of torch is not supported: the function takes a mesh of two axes, and has no "
    "argument for the mesh",
    applies=lambda layout: parallelism_of(layout, Replicate).implementation is Replicator.FSDP,
    repair=lambda layout: with_options(layout, Replicate, implementation=Replicator.DDP, wrapping=Wrapping.ROOT_ONLY),
    torch="<2.10",
)

LAYOUT_LIMITS: tuple[LayoutLimit, ...] = (
    NOT_YET_BY_FSDP,
    *COMPILED_DDP,
    COMPILED_AUTOGRAD_WITH_DDP_ONLY,
    NO_BF16_HOOK,
    *ROUNDING_LIMITS,
)
