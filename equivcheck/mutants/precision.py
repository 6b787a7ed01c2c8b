"""Precision, recomputation and ties, wrong on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivcheck.composition.registry import rounding_of
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import is_eager, is_wrapped, reduces_by_hooks
from equivcheck.mutants.places import EVERYWHERE, both, within
from equivcheck.scenario import DDP, FSDP1, FSDP2, SPMD, ElementType, Layout, Recompute, Replicate, Scenario
from equivcheck.scenario.mesh import DP, SHARD
from equivcheck.verdict.cause import Cause

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from equivcheck.train.setup import Setup

LOSS_FACTOR = 1024.0
"""By which a loss may be scaled so that gradients are not too small for float16: a power of 2, which rounds nothing."""


def reduce_in_bfloat16(setup: Setup) -> None:
    """Let gradients be summed in bfloat16, whatever the layout says."""
    from equivcheck.mutants import lower_precision

    lower_precision.reduce_in_bfloat16(setup)


def keep_masters_in_bfloat16(setup: Setup) -> None:
    """Round what the optimizer has updated, as if parameters were kept in bfloat16."""
    from equivcheck.mutants import lower_precision

    lower_precision.keep_masters_in_bfloat16(setup)


def leave_scaled(setup: Setup) -> None:
    """Leave gradients as those of a loss that has been scaled."""
    from equivcheck.mutants.gradients import scale

    setup.before_update.append(lambda optimizer, _step: scale(optimizer, LOSS_FACTOR))


def unscale_after_clipping(setup: Setup) -> None:
    """Clip gradients as those of a loss that has been scaled, and unscale them then."""
    from equivcheck.mutants.gradients import scale

    leave_scaled(setup)
    update = setup.update

    def unscale_and_update(optimizer: Optimizer) -> None:
        scale(optimizer, 1.0 / LOSS_FACTOR)
        update(optimizer)

    setup.update = unscale_and_update


def recompute_under_another_mask(setup: Setup) -> None:
    """Let a layer that is computed again for backward drop then what it kept, and keep what it dropped."""
    from equivcheck.mutants.recomputation import draw_again
    from equivcheck.train.model import Block

    for module in setup.model.modules():
        if isinstance(module, Block) and module.recomputes and module.layer.dropout:
            draw_again(module)


def untie_values(setup: Setup) -> None:
    """Let a layer that shares a weight go on with the values that this had at first, while its gradients go where they should."""
    from equivcheck.mutants.ties import Stale, untie

    untie(setup, Stale)


def untie_gradients(setup: Setup) -> None:
    """Let a layer that shares a weight use it, and give it no gradient."""
    from equivcheck.mutants.ties import Detached, untie

    untie(setup, Detached)


def _reduces_wide(scenario: Scenario) -> bool:
    """Whether bfloat16 has fewer digits than what several ranks reduce gradients in, and a hook can be put in the way."""
    layout = scenario.layout
    rounding = rounding_of(layout)
    is_wide = rounding is None or rounding.reduce not in _NARROW
    return is_wide and (_scatters(layout) or (is_wrapped(layout) and reduces_by_hooks(scenario)))


_NARROW = (ElementType.BFLOAT16, ElementType.FLOAT16)


def _scatters(layout: Layout) -> bool:
    return layout.has(FSDP2) and layout.mesh.size(DP, SHARD) > 1


def _clips(scenario: Scenario) -> bool:
    return scenario.training.clipping is not None


def _recomputes_dropout(scenario: Scenario) -> bool:
    """Whether a layer with dropout runs again in backward under the layout that is named."""
    kind, layers = scenario.layout.execution.checkpointing, scenario.training.model.layers
    again = {Recompute.NONE: (), Recompute.ODD_LAYERS: layers[1::2], Recompute.EVERY_LAYER: layers}[kind]
    return any(layer.dropout for layer in again)


def _shares_trained(scenario: Scenario) -> bool:
    layers = scenario.training.model.layers
    return any(layer.shares is not None and not layers[layer.shares].frozen for layer in layers)


def _shares_longer(scenario: Scenario) -> bool:
    """Whether a layer shares a weight for a step after the first under the layout that is named."""
    before = 0 if scenario.start is None else scenario.start.steps
    return _shares_trained(scenario) and scenario.training.steps - before > 1


_SHARING = (*within(DDP.tag), *(tag.tag for tag in (FSDP1, FSDP2, Replicate, SPMD)))

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="reduced_in_bfloat16",
        wrong="Gradients are reduced in bfloat16 rather than in the element type that they should be reduced in.",
        family=Family.PRECISION,
        layouts=("fsdp2", "ddp", "replicate", "fsdp2 x tensor_parallel", "ddp x tensor_parallel", "replicate x tensor_parallel"),
        applies=both(is_eager, _reduces_wide),
        plant=reduce_in_bfloat16,
        causes=(Cause.REDUCED_IN_LOWER_PRECISION,),
        minimum=Minimum(because="over one rank nothing is reduced"),
    ),
    Mutant(
        name="masters_in_bfloat16",
        wrong="Parameters are kept in bfloat16 between steps.",
        family=Family.PRECISION,
        layouts=EVERYWHERE,
        plant=keep_masters_in_bfloat16,
        causes=(Cause.MASTERS_IN_LOWER_PRECISION,),
        minimum=Minimum(ranks=1, because="the first update is rounded on every rank"),
    ),
    Mutant(
        name="never_unscaled",
        wrong="Gradients keep the factor by which the loss was scaled.",
        family=Family.PRECISION,
        layouts=EVERYWHERE,
        plant=leave_scaled,
        causes=(Cause.NOT_UNSCALED, Cause.SCALED),
        minimum=Minimum(ranks=1, because="the first gradient has the factor"),
    ),
    Mutant(
        name="unscaled_after_clipping",
        wrong="Gradients are unscaled after clipping, which takes them for larger than they are.",
        family=Family.PRECISION,
        layouts=EVERYWHERE,
        applies=_clips,
        plant=unscale_after_clipping,
        causes=(Cause.NOT_UNSCALED, Cause.SCALED),
        minimum=Minimum(ranks=1, because="the first gradient has the factor"),
    ),
    Mutant(
        name="mask_drawn_anew_by_recomputation",
        wrong="A layer that is computed again for backward draws a new dropout mask.",
        family=Family.PRECISION,
        layouts=EVERYWHERE,
        applies=both(is_eager, _recomputes_dropout),
        plant=recompute_under_another_mask,
        causes=(Cause.ANOTHER_MASK,),
        minimum=Minimum(ranks=1, because="one layer is computed again on one rank as well"),
    ),
    Mutant(
        name="tied_weight_left_behind",
        wrong="A shared weight is updated in one place, and stays as it was in the other.",
        family=Family.PRECISION,
        layouts=_SHARING,
        applies=both(is_eager, _shares_longer),
        plant=untie_values,
        causes=(Cause.UNTIED, Cause.STALE),
        minimum=Minimum(ranks=1, layers=2, steps=2, because="two layers share a weight, which is the same until it is updated"),
    ),
    Mutant(
        name="tied_weight_without_gradient",
        wrong="Of two layers that share a weight, one contributes nothing to its gradient.",
        family=Family.PRECISION,
        layouts=_SHARING,
        applies=both(is_eager, _shares_trained),
        plant=untie_gradients,
        causes=(Cause.UNTIED, Cause.GRADIENT_LOST),
        minimum=Minimum(ranks=1, layers=2, because="two layers share a weight; the first gradient shows it"),
    ),
)
"""Every mutant of the family."""
