"""Gradient clipping, wrong on purpose: it shows where clipping is active, and in gradients only after it."""

from __future__ import annotations

from equivcheck.mutants import norms
from equivcheck.mutants.data_parallel import OVER_OTHERS, WRAPPED
from equivcheck.mutants.mutant import Family, Minimum, Mutant
from equivcheck.mutants.needs import is_eager, is_wrapped, reduces_by_hooks
from equivcheck.mutants.norms import ClipByNorm
from equivcheck.scenario import DDP, ClipNorm, ClipValue, Layer, NormType, Replicate, Scenario
from equivcheck.scenario.mesh import DP, REPLICATE, SHARD, TP
from equivcheck.verdict.cause import Cause

BY_NORM = ("ddp", "replicate", "fsdp1", "fsdp2", "tensor_parallel", "fsdp2 x tensor_parallel")
"""Layouts that clip by norm."""
BY_PARAMETERS = ("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel", "fsdp2 x tensor_parallel")
"""Layouts in which the norm of some parameters can be asked for: `FullyShardedDataParallel` clips what it holds."""


def _clips_by_norm(scenario: Scenario) -> bool:
    return is_eager(scenario) and isinstance(scenario.training.clipping, ClipNorm)


def _norm_type(scenario: Scenario) -> NormType:
    assert isinstance(scenario.training.clipping, ClipNorm), scenario.training.clipping
    return scenario.training.clipping.norm_type


def _clips_shards(scenario: Scenario) -> bool:
    shards = 1 if is_wrapped(scenario.layout) else scenario.layout.mesh.size(DP, SHARD)
    return _clips_by_norm(scenario) and shards * scenario.layout.mesh.size(TP) > 1


def _adds_norms(scenario: Scenario) -> bool:
    return _clips_by_norm(scenario) and scenario.layout.mesh.size(DP, SHARD) > 1 and _norm_type(scenario) is not NormType.ONE


def _has_replicas(scenario: Scenario) -> bool:
    mesh = scenario.layout.mesh
    replicas = mesh.size(REPLICATE) if REPLICATE in mesh.names or not _replicates(scenario) else mesh.size(DP)
    return _clips_by_norm(scenario) and replicas > 1 and _norm_type(scenario) is not NormType.INF


def _replicates(scenario: Scenario) -> bool:
    return scenario.layout.has(DDP, Replicate)


def _has_vectors(layer: Layer) -> bool:
    return not layer.frozen and (layer.bias or layer.norm is not None)


def _clips_vectors(scenario: Scenario) -> bool:
    return _clips_by_norm(scenario) and any(map(_has_vectors, scenario.training.model.layers))


def _sends_as_computed(scenario: Scenario) -> bool:
    # Gradients that are views into buckets are divided in another way than others: a difference of a last place.
    views = any(
        isinstance(parallelism, DDP) and parallelism.gradient_as_bucket_view
        for layout in scenario.layouts
        for parallelism in layout.parallelisms
    )
    return reduces_by_hooks(scenario) and not views


def _sends_by_norm(scenario: Scenario) -> bool:
    return _sends_as_computed(scenario) and isinstance(scenario.training.clipping, ClipNorm)


def _sends_by_value(scenario: Scenario) -> bool:
    return _sends_as_computed(scenario) and isinstance(scenario.training.clipping, ClipValue)


ACTIVE = "one gradient with a norm above the largest shows it at the first step"
SPLIT = "two ranks hold different elements of one gradient"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="local_norm",
        wrong="Each rank clips by the norm of the gradients that it holds.",
        family=Family.CLIPPING,
        layouts=("fsdp2", "fsdp1", "tensor_parallel", *OVER_OTHERS),
        applies=_clips_shards,
        plant=ClipByNorm(norms.of_own_shard),
        causes=(Cause.LOCAL_NORM,),
        minimum=Minimum(because=f"{SPLIT}; one layer is enough"),
    ),
    Mutant(
        name="norms_added_up",
        wrong="The norms of shards are added up, whatever the type of the norm.",
        family=Family.CLIPPING,
        layouts=("fsdp2", "fsdp1"),
        applies=_adds_norms,
        plant=ClipByNorm(norms.added_up),
        causes=(Cause.ANOTHER_NORM,),
        minimum=Minimum(because=f"{SPLIT}; one layer is enough"),
    ),
    Mutant(
        name="clipped_before_reduction",
        wrong="Each rank clips its own gradients before they are averaged.",
        family=Family.CLIPPING,
        layouts=WRAPPED,
        applies=_sends_by_norm,
        plant=norms.clip_buckets,
        causes=(Cause.CLIPPED_BEFORE_REDUCTION,),
        minimum=Minimum(because="on one rank there is nothing to come before; of two, one may clip and the other not"),
    ),
    Mutant(
        name="clamped_before_reduction",
        wrong="Each rank clamps the elements of its own gradients before they are averaged.",
        family=Family.CLIPPING,
        layouts=WRAPPED,
        applies=_sends_by_value,
        plant=norms.clip_buckets,
        causes=(Cause.CLIPPED_BEFORE_REDUCTION,),
        minimum=Minimum(because="elements of two ranks' gradients are clamped, and not those of their mean"),
    ),
    Mutant(
        name="replicas_in_norm",
        wrong="The norm counts gradients that ranks hold alike once for each of them.",
        family=Family.CLIPPING,
        layouts=("ddp", "replicate", "fsdp2", "ddp x tensor_parallel", "replicate x tensor_parallel"),
        applies=_has_replicas,
        plant=ClipByNorm(norms.with_replicas),
        causes=(Cause.REPLICAS_IN_NORM,),
        minimum=Minimum(because="two ranks hold one gradient alike"),
    ),
    Mutant(
        name="vectors_not_in_norm",
        wrong="Biases and the weights of norms are left out of the norm, but clipped by it.",
        family=Family.CLIPPING,
        layouts=BY_PARAMETERS,
        applies=_clips_vectors,
        plant=ClipByNorm(norms.of_matrices),
        causes=(Cause.PART_OF_NORM,),
        minimum=Minimum(ranks=1, because="one layer has a weight and a bias"),
    ),
    Mutant(
        name="first_parameter_not_in_norm",
        wrong="The first parameter is left out of the norm, but clipped by it.",
        family=Family.CLIPPING,
        layouts=BY_PARAMETERS,
        applies=_clips_by_norm,
        plant=ClipByNorm(norms.of_all_but_first),
        causes=(Cause.PART_OF_NORM, Cause.NOT_CLIPPED),
        minimum=Minimum(ranks=1, because="what is left out may be all there is: then nothing is clipped"),
    ),
    Mutant(
        name="clipped_by_own_norms",
        wrong="Each parameter is clipped by its own norm rather than by that of all.",
        family=Family.CLIPPING,
        layouts=BY_PARAMETERS,
        applies=_clips_by_norm,
        plant=norms.clip_each,
        causes=(Cause.PART_OF_NORM,),
        minimum=Minimum(ranks=1, because="one layer has a weight and a bias"),
    ),
    Mutant(
        name="another_norm_type",
        wrong="Gradients are clipped by a norm of another type than the one asked for.",
        family=Family.CLIPPING,
        layouts=BY_NORM,
        applies=_clips_by_norm,
        plant=norms.use_another_type,
        causes=(Cause.ANOTHER_NORM,),
        minimum=Minimum(ranks=1, because="a gradient of two elements has norms that differ"),
    ),
    Mutant(
        name="norm_after_clipping_returned",
        wrong="Gradients are clipped rightly, and the norm that they then have is returned.",
        family=Family.CLIPPING,
        layouts=BY_NORM,
        applies=_clips_by_norm,
        plant=norms.report_norm_after,
        causes=(Cause.NORM_MISREPORTED,),
        minimum=Minimum(ranks=1, because=f"{ACTIVE}, and the norm alone does"),
    ),
    Mutant(
        name="not_clipped",
        wrong="The norm is computed and returned, and gradients stay as they are.",
        family=Family.CLIPPING,
        layouts=BY_NORM,
        applies=_clips_by_norm,
        plant=norms.clip_nothing,
        causes=(Cause.NOT_CLIPPED,),
        minimum=Minimum(ranks=1, because=ACTIVE),
    ),
    Mutant(
        name="scaled_up_to_norm",
        wrong="Gradients are scaled to the largest norm also where theirs is smaller.",
        family=Family.CLIPPING,
        layouts=BY_NORM,
        applies=_clips_by_norm,
        plant=norms.scale_to_norm,
        causes=(Cause.SCALED,),
        minimum=Minimum(ranks=1, because="one gradient with a norm below the largest shows it at the first step"),
    ),
)
"""Every mutant of the family."""
