"""Writes load-balancing losses of pipeline stages into a script."""

from __future__ import annotations

from equivcheck.layouts.base.script.draft import Draft
from equivcheck.layouts.base.script.text import call
from equivcheck.layouts.parallelisms.pipeline.export_steps import group_code
from equivcheck.scenario import Pipeline, TensorParallel

_ADDED_LOSS = (
    "class AddedLoss(torch.autograd.Function):",
    '    """Identity on activations that also starts the backward of another loss."""',
    "",
    "    @staticmethod",
    "    def forward(ctx, values, loss):",
    "        ctx.gradient = torch.full_like(loss, {scale})",
    "        return values.detach()",
    "",
    "    @staticmethod",
    "    def backward(ctx, gradient):",
    "        return gradient, ctx.gradient",
)
_BALANCED = (
    "class Balanced(nn.Module):",
    '    """Stage that starts the backward of its own load-balancing losses: only the last one has the main loss."""',
    "",
    "    last, kept = 0.0, 0.0  # loss of the last forward, and sum over a microbatch's chunks",
    "",
    "    def __init__(self, stage: nn.Module) -> None:",
    "        super().__init__()",
    "        self.stage = stage",
    "",
    "    def forward(self, values, **masks):",
    "        values, Balanced.last = self.stage(values, **masks), 0.0",
    "        loss = balance_loss(self.stage, (), {positions})",
    "        if not isinstance(loss, torch.Tensor):",
    "            return values",
    "{full}",
    "        Balanced.last = loss.detach()",
    "        return AddedLoss.apply(values, loss)",
)


def define_balance(draft: Draft, parallelism: Pipeline) -> None:
    """Define a module around a stage that adds the stage's load-balancing losses to the graph of its activations."""
    layout, training = draft.scenario.layout, draft.scenario.training
    counts = [training.rows_at(step) * (training.model.length or 1) // layout.num_data_ranks for step in range(training.steps)]
    positions = str(counts[0]) if len(set(counts)) == 1 else f"{counts}[loss_fn.step]"
    full = []
    if layout.has(TensorParallel):
        draft.need("torch.distributed.tensor", "DTensor")
        full = ["        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss"]
    scale = str(float(parallelism.num_chunks if parallelism.scale_grads else 1))
    draft.definitions.append([line.replace("{scale}", scale) for line in _ADDED_LOSS])
    lines = [line.replace("{positions}", positions) for line in _BALANCED]
    at = lines.index("{full}")
    draft.definitions.append([*lines[:at], *full, *lines[at + 1 :]])


def balance_lines(draft: Draft, parallelism: Pipeline) -> list[str]:
    """Return the lines that add a microbatch's load-balancing losses in all stages to its loss. Empty without such losses."""
    if not draft.scenario.training.model.balances:
        return []
    return [
        "balance, Balanced.kept = torch.tensor(float(Balanced.kept)), 0.0",
        call("dist.all_reduce", "balance", group=group_code(draft, parallelism)),
        "total = total + balance",
    ]
