"""Every deviation from the torch calls that a user would write, with its reason.

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
    """Function or class that makes the change, as ``module:name``."""
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
        "hooks redistribute DTensor gradients to their parameters' placements, unless redistribute_gradients is False",
        "propagation leaves gradients partial or replicated, so DTensor refuses in-place updates, and up to torch 2.9 norms are "
        "wrong",
        "https://github.com/pytorch/pytorch/issues/165962, and the limits of layouts without redistribute_gradients",
    ),
    _one(
        "training.clipping:clip_by_norm_of_norms",
        "clipping takes one norm for plain gradients and one for the DTensors of each mesh, then the norm of these norms",
        "clip_grad_norm_ puts all of them into one tensor, which DTensor refuses",
        "https://github.com/pytorch/pytorch/issues/180346",
    ),
    _one(
        "training.clipping:clip_by_value",
        "clipping by value makes one call for plain gradients and one for the DTensors of each mesh, or none without gradients",
        "a single call refuses mixed tensors, and raises without gradients",
        "clip_grad_value_of_nothing, mixed_plain_and_dtensor",
    ),
    _one(
        "layouts.base.local_tensors:clip_across",
        "over tensor parallelism, DDP and replicate clip by the norm over all shards, with local gradients turned back into "
        "DTensors",
        "both leave this to their users, because clip_grad_norm_ only sees a rank's own shards",
    ),
    _one(
        "layouts.parallelisms.tensor_parallel.styles:tie_head_again",
        "a head tied to the embedding gets its weight again after parallelize_module",
        "parallelize_module creates a parameter for each of the two modules",
        "tensor_parallel_unties",
    ),
    _one(
        "layouts.parallelisms.pipeline.schedules:clip_across",
        "clipping takes the norm over all stages, counts copies of a weight once, and casts to the parameters' element type "
        "first",
        "pipelining leaves this to its users; get_total_norm without gradients returns float32, whatever the other ranks send",
    ),
    _one(
        "layouts.parallelisms.pipeline.schedules:Copy.sum_gradients",
        "gradients are summed over all copies of a weight that stages on several ranks use, after the last microbatch",
        "pipelining leaves this to its users, for example for a head tied to an embedding in another stage",
    ),
    _one(
        "layouts.parallelisms.pipeline.schedules:_keep_name",
        "a copy of a weight keeps the name of its first use, even if that is in a stage on another rank",
        "parameter groups and checkpoints use the names of the full model",
    ),
    _one(
        "layouts.parallelisms.fsdp1.flat_parameters:clip_flat",
        "FSDP1 clips by FullyShardedDataParallel.clip_grad_norm_",
        "its documentation requires this",
    ),
    _one(
        "layouts.parallelisms.fsdp1.flat_parameters:release",
        "flat parameters drop their modules at the end of a run",
        "a C++ hook keeps some of them alive forever, so that a process with thousands of runs goes out of memory",
        "not reported",
    ),
    _one(
        "worlds.dtensor_caches:forget_shardings",
        "DTensor's caches of operations and redistributions are cleared when a rank changes its mesh, when they grow large, and "
        "on torch <2.11 after each program",
        "the caches confuse equal submeshes of two meshes, so results lie on the wrong mesh or ranks hang; and an embedding's "
        "gradient gets the number of rows of an earlier embedding",
        "not reported",
    ),
    _one(
        "worlds.gloo.matching.torch_private:listen_to_collectives",
        "on gloo, ranks compare operation, reduction, element type, sizes and root before each collective",
        "gloo computes with whatever bytes the ranks pass, and returns wrong numbers",
    ),
    _one(
        "layouts.composition.program:_submesh",
        "submeshes are created once and cached",
        "slicing is slow, and DTensor's caches treat each slice as a new mesh",
    ),
    _one(
        "layouts.parallelisms.replicate.torch_private:_replicate_with_ddp",
        "a private call initialises composable replicate before the optimizer is built, not in the first forward",
        "over tensor parallelism, replicate swaps parameters for local tensors, which an optimizer built earlier would not see",
        "not reported",
    ),
    _one(
        "layouts.base.execution.compiled:compiling",
        "the compiler is reset before and after each scenario, and may recompile a function 64 times",
        "scenarios must not depend on earlier ones; beyond the default of 8 recompiles, a function would silently run eagerly",
    ),
    _one(
        "layouts.base.execution.compiled:_traceable_reducer",
        "under compiled autograd, DDP reduces by Python hooks, and its changes to the compiler's settings are undone",
        "compiled autograd cannot trace DDP's C++ reducer; the settings would affect later scenarios",
    ),
    _one(
        "layouts.base.execution.compiled:compile_setup",
        "layers that are compiled one by one have static shapes",
        "layers share code, and symbolic shapes of DTensors recurse without end",
        "dtensor_symbolic_shapes_recurse",
    ),
    _one(
        "layouts.base.execution.whole_step:_WholeSteps",
        "a traced step works on copies of parameters, gradients and state; the optimizer steps once more without gradients",
        "the train loop reads the old values afterwards, and schedules expect a step",
    ),
    _one(
        "layouts.composition.resume:_Progress",
        "checkpoints store a schedule's step, but not its learning rates",
        "pipeline stages have their own parameter groups; learning rates come back with the optimizer's state",
    ),
    _one(
        "training.layers.module:replicated_like",
        "constants that a layer creates on every rank become replicated DTensors if its activations are DTensors",
        "DTensors and plain tensors do not mix",
    ),
    _one(
        "layouts.parallelisms.tensor_parallel.styles:Replicated",
        "modules with replicated parameters use equivcheck's own ParallelStyle",
        "torch has no style that replicates parameters and redistributes input and output",
    ),
    _one(
        "layouts.parallelisms.fsdp1.apply:_options",
        "FSDP1 gets the CPU as its device",
        "ranks have no accelerator, but FSDP1 would look for one",
    ),
    _one(
        "layouts.parallelisms.fsdp2.apply:FSDP2Kind",
        "CPUOffloadPolicy does not pin memory",
        "pinning needs an accelerator",
    ),
    _one(
        "training.accumulate:microbatch_loss",
        "outputs are cast to the targets' element type before the loss",
        "mixed precision returns outputs in its compute type",
    ),
    _one(
        "training.accumulate:scale_loss",
        "a loss that sums over rows is multiplied by the number of data ranks",
        "data parallelism averages gradients",
    ),
    _one(
        "training.read:redistribute_like",
        "if gradients or optimizer state have other placements than their parameters, copies of them are redistributed before "
        "they are read",
        "they are compared element by element with their parameters; the optimizer's own tensors stay as they are",
    ),
    _one(
        "programs.run.plain.collectives:Sum",
        "up to torch 2.10, sums over ranks in tensor programs on plain tensors have equivcheck's own derivative",
        "the functional all_reduce has none there, and passes gradients on unchanged",
        "https://github.com/pytorch/pytorch/pull/168140",
    ),
    _one(
        "strategies.scenario:_training",
        "under SPMD, five of six mean squared error losses are replaced by summed ones",
        "torch computes a wrong gradient for that mean, and a KNOWN check proves nothing else about its scenario",
        "dtensor_mse_loss_mean",
    ),
)
