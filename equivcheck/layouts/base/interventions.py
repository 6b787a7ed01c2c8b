"""Every change that equivcheck makes to the torch calls a user would write, with its reason.

A check says nothing about behaviour avoided by these changes. The documentation shows this table, which must be complete.
"""

from __future__ import annotations

from dataclasses import dataclass

BY_DEFINITION = "by definition"
"""Marks a change that works around no torch problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervention:
    """One change to a rank's torch calls."""

    place: str
    """``module:name`` of the function or class responsible."""
    what: str
    """The change."""
    why: str
    """Purpose, or the failure without it."""
    upstream: str
    """The torch problem behind it: a link, a known issue's id, or "not reported". Otherwise `BY_DEFINITION`."""


def _one(place: str, what: str, why: str, upstream: str = BY_DEFINITION) -> Intervention:
    return Intervention(place=f"equivcheck.{place}", what=what, why=why, upstream=upstream)


INTERVENTIONS: tuple[Intervention, ...] = (
    _one(
        "layouts.base.distribute:redistribute_gradients",
        "hooks redistribute gradients of DTensors to their parameters' placements, unless redistribute_gradients is False",
        "propagation leaves them pending a sum or whole: updates in place are refused, and up to torch 2.9 norms are wrong",
        "https://github.com/pytorch/pytorch/issues/165962, and the limits of layouts without redistribute_gradients",
    ),
    _one(
        "training.clipping:clip_by_norm_of_norms",
        "norms of plain gradients and of the DTensors of each mesh are taken apart, then the norm of these",
        "clip_grad_norm_ puts them into one tensor, which is refused",
        "https://github.com/pytorch/pytorch/issues/180346",
    ),
    _one(
        "training.clipping:clip_by_value",
        "gradients are clipped in one call for plain ones and one for the DTensors of each mesh, none where there is no gradient",
        "one call refuses a mixture, and raises where it is given no gradient",
        "clip_grad_value_of_nothing, mixed_plain_and_dtensor",
    ),
    _one(
        "layouts.base.local_tensors:clip_across",
        "over tensor parallelism, DDP and replicate clip by the norm over all shards, from local gradients made DTensors again",
        "they leave that to their users: clip_grad_norm_ takes the norm over what a rank holds",
    ),
    _one(
        "layouts.parallelisms.tensor_parallel.styles:tie_again",
        "a head that is tied to the embedding is given its weight once more after parallelize_module",
        "parallelize_module makes a parameter for each of the two modules",
        "tensor_parallel_unties",
    ),
    _one(
        "layouts.parallelisms.pipeline.schedules:clip_across",
        "the norm is taken over all stages, copies of a weight counted once, after a cast to the element type of the parameters",
        "pipelining leaves that to its users; get_total_norm of no gradients is float32, whatever the other ranks send",
    ),
    _one(
        "layouts.parallelisms.pipeline.schedules:Copy.sum_gradients",
        "copies of a weight with uses in stages of several ranks have their gradients summed after the last microbatch",
        "pipelining leaves that to its users, as of a head that is tied to an embedding in another stage",
    ),
    _one(
        "layouts.parallelisms.pipeline.schedules:_keep_name",
        "a copy of a weight whose first use is in a stage of another rank keeps the name of that use",
        "optimizer groups and checkpoints go by names, which are those of the whole model then",
    ),
    _one(
        "layouts.parallelisms.fsdp1.flat_parameters:clip_flat",
        "gradients are clipped by FullyShardedDataParallel.clip_grad_norm_",
        "its documentation asks for it",
    ),
    _one(
        "layouts.parallelisms.fsdp1.flat_parameters:release",
        "flat parameters let go of their modules when all is over",
        "a hook in C++ keeps some alive for ever, so that a process that runs thousands runs out of memory",
        "not reported",
    ),
    _one(
        "worlds.dtensor_caches:forget_shardings",
        "what DTensor keeps of operations and redistributions is dropped when a rank goes on to another mesh, has much of it, or "
        "on torch <2.11 ends a program",
        "equal parts of two meshes are one to it: results lie on a mesh that they were not computed on, or ranks wait for ever; "
        "and the gradient of an embedding gets as many rows as one before it had",
        "not reported",
    ),
    _one(
        "worlds.gloo.matching.torch_private:listen_to_collectives",
        "in gloo, operation, reduction, element type, sizes and root of each collective are compared before it is issued",
        "gloo computes with whatever bytes the ranks pass, and returns wrong numbers",
    ),
    _one(
        "layouts.composition.program:_submesh",
        "parts of a mesh are made once and kept",
        "slicing is slow, and each slice is a new mesh to DTensor's caches",
    ),
    _one(
        "layouts.parallelisms.replicate.torch_private:_replicate_with_ddp",
        "composable replicate is initialised before the optimizer is built, by a private call, not by the first forward",
        "over tensor parallelism it puts local tensors in the place of parameters, which an optimizer built before does not see",
        "not reported",
    ),
    _one(
        "layouts.base.execution.compiled:compiling",
        "the compiler is reset before and after each scenario, and may recompile a function 64 times",
        "scenarios must not depend on those before them; beyond the limit of 8 it would run eagerly without an error",
    ),
    _one(
        "layouts.base.execution.compiled:_traceable_reducer",
        "under compiled autograd DDP reduces by hooks in Python, and what it leaves in the compiler's settings is undone",
        "compiled autograd cannot look into its reducer in C++; the settings would stay for scenarios after it",
    ),
    _one(
        "layouts.base.execution.compiled:compile_setup",
        "layers that are compiled one by one have static shapes",
        "they share their code, and symbolic shapes of DTensors recurse without end",
        "dtensor_symbolic_shapes_recurse",
    ),
    _one(
        "layouts.base.execution.whole_step:_WholeSteps",
        "a traced step works on copies of parameters, gradients and state; the optimizer steps once more without gradients",
        "the loop reads the old values after it, and schedules want to see a step",
    ),
    _one(
        "layouts.composition.resume:_Progress",
        "checkpoints keep of a schedule how far it is, not its rates for each group",
        "the stages of a pipeline have groups of their own; rates come back with the optimizer's state",
    ),
    _one(
        "training.layers.module:beside",
        "tensors that a layer makes alike on every rank become replicated DTensors where its values are DTensors",
        "DTensors do not mix with plain tensors",
    ),
    _one(
        "layouts.parallelisms.tensor_parallel.styles:Replicated",
        "modules that a plan leaves whole have a ParallelStyle of equivcheck's own",
        "torch has none that keeps parameters whole and redistributes input and output",
    ),
    _one(
        "layouts.parallelisms.fsdp1.apply:_options",
        "FSDP1 is given the CPU as its device",
        "ranks have no accelerator, and it would look for one",
    ),
    _one(
        "layouts.parallelisms.fsdp2.apply:FSDP2Kind",
        "CPUOffloadPolicy does not pin memory",
        "pinning needs an accelerator",
    ),
    _one(
        "training.accumulate:part_loss",
        "outputs are cast to the element type of the targets before the loss",
        "mixed precision leaves outputs in the element type that it computes in",
    ),
    _one(
        "training.accumulate:scaled",
        "a loss that sums over rows is multiplied by the number of data ranks",
        "data parallelism averages gradients",
    ),
    _one(
        "training.read:placed_as",
        "copies of gradients and optimizer state that do not lie as their parameters do are redistributed to be read",
        "they are compared by where their parameters' elements lie; what the optimizer sees stays as it is",
    ),
    _one(
        "programs.run.plain.collectives:Sum",
        "up to torch 2.10 sums over ranks in tensor programs on plain tensors have a derivative of equivcheck's own",
        "the functional all_reduce has none there, and hands gradients on as they are",
        "https://github.com/pytorch/pytorch/pull/168140",
    ),
    _one(
        "strategies.scenario:_training",
        "under SPMD five of six losses drawn as a mean of squared errors are drawn as a sum",
        "the gradient of that mean is wrong, and a check that ends as KNOWN proves nothing else about its scenario",
        "dtensor_mse_loss_mean",
    ),
)
