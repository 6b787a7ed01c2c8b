"""Weights of which several ranks of a pipeline have copies, in a script."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.text import block
from equivcheck.layouts.parallelisms.pipeline.stages import SharedWeight

WEIGHTS = "weights = [model.get_submodule(owner).weight for owner, _ in SHARED]"
"""Before ranks let go of the layers of other stages."""

SUM_GRADIENTS = (
    "for weight, group in copies:",
    "    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad",
    "    dist.all_reduce(weight.grad, group=group)",
)
"""After all microbatches."""
CLIPPED = "clip_across_stages(list(model.parameters()), [weight for weight in model.parameters() if weight not in uncounted])"
"""Clipping by the norm of the whole model, in which one copy of each weight counts."""


def copy_weights(draft: Draft, shared: Sequence[SharedWeight]) -> None:
    """Let ranks keep copies of weights by the names that they have in the whole model, and sum their gradients."""
    entries = [
        (
            draft.form.paths.get(weight.owner, weight.owner),
            [weight.first, *(rank for rank in weight.ranks if rank != weight.first)],
        )
        for weight in shared
    ]
    draft.definitions.append([f"SHARED = {entries}  # whose weights, and where copies are"])
    naming = [
        '"""Let modules without a use have a weight by the name that it has in the whole model."""',
        'for part in owner.split("."):',
        "    if getattr(module, part, None) is None:",
        "        module.add_module(part, nn.Identity())",
        "    module = getattr(module, part)",
        "module.weight = weight",
    ]
    draft.definitions.append(block("def keep_name(module: nn.Module, owner: str, weight: nn.Parameter) -> None:", naming))
    draft.add(
        LoopPosition.WRAP,
        "copies, uncounted = [], set()",
        "for weight, (owner, ranks) in zip(weights, SHARED, strict=True):",
        "    group = dist.new_group(ranks)",
        "    if dist.get_rank() in ranks and weight.requires_grad:",
        "        copies.append((weight, group))",
        "    if dist.get_rank() in ranks[1:]:",
        "        keep_name(model, owner, weight)",
        "        uncounted.add(weight)",
    )
    draft.add(LoopPosition.BEFORE_READING, *SUM_GRADIENTS)
