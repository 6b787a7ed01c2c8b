"""The exam: silent bugs of public record, in the order in which the docs list them."""

from __future__ import annotations

from exam import counts, dtensors, groups, parts, replicas
from exam.item import Item, Listed, Planted

PYTORCH = "https://github.com/pytorch/pytorch/issues"
TITAN = "https://github.com/pytorch/torchtitan"
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/issues/7452"
ENTANGLE = "https://github.com/nyu-systems/Entangle"
UNREAD = "the text of the report could not be read"

OF_TORCH = (
    Item(
        name="pytorch #190746",
        link=f"{PYTORCH}/190746",
        about="within `loss_parallel`, every `log_softmax` has the backward of `cross_entropy`",
        by=Listed("llama", "loss written out (pytorch #190746)"),
        first="step 0 gradient embedding.weight",
    ),
    Item(
        name="pytorch #190626",
        link=f"{PYTORCH}/190626",
        about="FSDP2 sums gradients over tensor-parallel ranks in `param_dtype`, although `reduce_dtype` is set",
        by=dtensors.reduce_dtype,
        first="step 0 gradient 0.weight",
        note="with rows that are exact in bfloat16; scenarios have no lower precision over tensor parallelism",
    ),
    Item(
        name="pytorch #172932",
        link=f"{PYTORCH}/172932",
        about="`to_local` and `from_local` of a partial sum change only the gradient",
        by=dtensors.by_local,
        first="step 0 gradient first.weight",
        note="with the default gradient placement of torch before 2.11",
    ),
    Item(
        name="pytorch #153603",
        link=f"{PYTORCH}/153603",
        about="a reduced DTensor times a number uses the first such number, from a cache",
        by=replicas.remembered_factor,
        first="step 1 loss loss",
        note="planted as a cache, because torch 2.9 and newer do not have it",
    ),
    *(Item(name=f"pytorch #{number}", link=f"{PYTORCH}/{number}", note=UNREAD) for number in (191926, 155903, 168134)),
    Item(
        name="torchtitan #2387",
        link=f"{TITAN}/issues/2387",
        about="under tensor parallelism, the partial sums of a router's gradient are not summed",
        by=Listed("mixture_of_experts", "router gradient in parts (transformers #48205)"),
        first="step 0 gradient router.weight",
    ),
    Item(
        name="torchtitan #4054",
        link=f"{TITAN}/pull/4054",
        about="`local_map` around experts lacks the partial placement for the input gradient",
        by=dtensors.experts_without_placements,
        first="step 0 gradient gate.weight",
    ),
    Item(name="torchtitan #4637", link=f"{TITAN}/issues/4637", note=UNREAD),
)
OF_MEGATRON = (
    Item(name="Megatron-LM #7452 (1)", link=MEGATRON, note=UNREAD),
    Item(
        name="Megatron-LM #7452 (2)",
        link=MEGATRON,
        about="a vocabulary-parallel cross-entropy gets gathered logits",
        by=parts.whole_logits,
        first="step 0 loss loss",
    ),
    Item(
        name="Megatron-LM #7452 (3)",
        link=MEGATRON,
        about="the loss for multi-token prediction is scaled by local token counts",
        by=counts.own_counts_of_second_loss,
        first="step 0 loss loss",
    ),
    Item(
        name="Megatron-LM #7452 (4)",
        link=MEGATRON,
        about="recomputation gathers its input over the default group instead of the sharding group",
        by=groups.trained(groups.Checkpointed),
        first="step 0 gradient after.weight",
    ),
    Item(
        name="Megatron-LM #7452 (5)",
        link=MEGATRON,
        about="the padding mask is sharded by the rank in the default group",
        by=groups.trained(groups.Masked),
        first="step 0 loss loss",
    ),
    Item(
        name="Megatron-LM #7452 (6)",
        link=MEGATRON,
        about="the projections of cross-attention are created without their group",
        by=groups.trained(groups.Crossed),
        first="step 0 gradient before.weight",
    ),
    Item(
        name="Megatron-LM #7452 (7)",
        link=MEGATRON,
        about="embeddings are sharded by the rank in the default group",
        by=groups.trained(groups.Embedded),
        first="step 0 loss loss",
    ),
    Item(
        name="Megatron-LM #7452 (8)",
        link=MEGATRON,
        about="attention sinks are sharded by heads, but the clipping norm has only those of the first rank",
        by=parts.sinks_not_in_norm,
        first="step 0 gradient sinks",
    ),
    Item(
        name="Megatron-LM #7452 (9)",
        link=MEGATRON,
        about="under context parallelism, each shard divides by its local number of tokens",
        by=counts.own_count_of_part,
        first="step 0 loss loss",
    ),
    Item(
        name="Megatron-LM #7452 (10)",
        link=MEGATRON,
        about="a sum over ranks overwrites the local token count in a router's auxiliary loss",
        by=counts.auxiliary(counts.count_overwritten),
        first="step 0 gradient router.weight",
    ),
    Item(
        name="Megatron-LM #7452 (11)",
        link=MEGATRON,
        about="the gradient of a norm shared by all heads has only the local heads",
        by=parts.norm_unsummed,
        first="step 0 gradient weight",
    ),
    Item(
        name="Megatron-LM #7452 (12)",
        link=MEGATRON,
        about="a checkpoint is restored by layer names within a pipeline stage",
        by=parts.layers_of_first_stage,
        first="step 0 loss loss",
        torch=">=2.10",
    ),
    Item(
        name="Megatron-LM #7452 (13)",
        link=MEGATRON,
        about="the forward of attention replaces a group that its caller also uses",
        by=groups.trained(groups.Replacing),
        first="step 1 loss loss",
        note="shown in training; reported for evaluation, which is not compared",
    ),
    Item(
        name="Megatron-LM #7452 (B)",
        link=MEGATRON,
        about="the gradient for sequence shards is summed over ranks that all have the full gradient",
        by=parts.copies_summed,
        first="step 0 gradient decoder.weight",
    ),
    Item(
        name="Megatron-LM #7452 (C, first)",
        link=MEGATRON,
        about="an auxiliary loss that is already a mean over all ranks is averaged over ranks again",
        by=counts.auxiliary(counts.divided_twice),
        first="step 0 gradient router.weight",
    ),
    Item(
        name="Megatron-LM #7452 (C, second)",
        link=MEGATRON,
        about="gradients of experts are reduced without their scaling factor",
        by=Listed("mixture_of_experts", "expert gradients summed (pytorch #160285)"),
        first="step 0 gradient experts.0.0.weight",
    ),
)
OF_OTHERS = (
    Item(
        name="Entangle, bug 6",
        link=ENTANGLE,
        about="means of microbatches are summed, but not divided by their number",
        by=Planted("microbatches_summed"),
        first="step 0 gradient layers.0.linear.weight",
    ),
    Item(
        name="Entangle, bug 7",
        link=ENTANGLE,
        about="under a wrong configuration, the input gradient of a column-wise layer is not summed",
        by=Planted("column_input_gradient_not_reduced"),
        first="step 0 gradient layers.0.norm.weight",
    ),
    Item(
        name="Entangle, bug 8",
        link=ENTANGLE,
        about="under sequence parallelism, the gradient of a replicated router is not summed",
        by=Planted("replicated_layer_gradient_not_reduced"),
        first="step 0 gradient layers.1.linear.weight",
    ),
    Item(
        name="Entangle, bug 9",
        link=ENTANGLE,
        about="under sequence parallelism, the gradient of a norm is not summed",
        by=Planted("norm_gradient_not_reduced"),
        first="step 0 gradient layers.1.norm.weight",
    ),
    Item(
        name="TrainCheck, x-jxmnop",
        link="https://x.com/jxmnop/status/1778520637193240892",
        about="the module inside DDP is called, so gradients are not reduced",
        by=Planted("inner_module_called"),
        first="step 0 gradient layers.0.linear.weight",
    ),
    Item(
        name="TrainCheck, pytorch-104336",
        link=f"{PYTORCH}/104336",
        about="a model that is moved after DDP wrapped it loses the hooks that reduce gradients",
        by=replicas.moved_after_wrapping,
        first="step 0 gradient weight",
        note="moved to another element type and back, which has the same effect as another device",
    ),
)
ITEMS = (*OF_TORCH, *OF_MEGATRON, *OF_OTHERS)
