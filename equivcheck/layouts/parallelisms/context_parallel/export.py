"""Writes context parallelism into a script: the script contains the same exchanges as the ranks here."""

from __future__ import annotations

from equivcheck.layouts.base.partition import chunk_size, chunk_sizes
from equivcheck.layouts.base.positions import positions_of_ranks
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.mesh import mesh_of, sum_gradients
from equivcheck.layouts.base.script.text import source_of
from equivcheck.scenario import AttentionExchange, ContextParallel
from equivcheck.scenario.mesh import CP


def write(draft: Draft, parallelism: ContextParallel) -> None:
    """Shard the script's sequences over ranks, let attention exchange positions, and sum gradients."""
    _define(draft, parallelism.exchange)
    model, size = draft.scenario.training.model, draft.scenario.layout.mesh.size(CP)
    if size == 1:
        return
    parts = positions_of_ranks(parallelism, model.length or 0, size)
    mesh, kind = mesh_of(draft, parallelism), _kind(parallelism.exchange).__name__
    draft.add(
        LoopPosition.WRAP,
        f"parts = tuple(torch.tensor(part, dtype=torch.int64) for part in {parts})",
        f"ranks = PositionRanks({mesh}.get_group(), {mesh}.get_local_rank(), parts)",
        "for layer in model.modules():",
        '    if hasattr(layer, "sequence"):',
        f"        layer.sequence = {kind}(ranks)",
    )
    dim = 1 - draft.scenario.training.data.batch_dim
    draft.add(LoopPosition.TAKE, f"inputs, targets = (values.index_select({dim}, ranks.own) for values in (inputs, targets))")
    if "masks" in draft.form.extras:
        draft.add(LoopPosition.TAKE, "masks = [mask.index_select(1, ranks.own) for mask in masks]")
    _scale(draft, parts)
    draft.add(LoopPosition.BEFORE_READING, f"total *= {size}  # each rank's loss is a partial sum")
    sum_gradients(draft, "ranks.group")


def _scale(draft: Draft, parts: tuple[tuple[int, ...], ...]) -> None:
    """Scale a mean over this rank's positions, so that the sum over ranks is the mean over all positions."""
    if not draft.scenario.training.loss.is_mean:
        return
    if not all(parts):
        raise refuse("LoadBalancer that gives some ranks no positions", "the mean loss on such a rank is NaN")
    draft.add(LoopPosition.SCALE, "loss = loss * (len(ranks.own) / ranks.length)")


def _kind(exchange: AttentionExchange) -> type:
    from equivcheck.layouts.parallelisms.context_parallel.sequences import SEQUENCES

    return SEQUENCES[exchange]


def _define(draft: Draft, exchange: AttentionExchange) -> None:
    from equivcheck.layouts.parallelisms.context_parallel import ranks, sequences
    from equivcheck.training.layers.sequence import Sequence

    draft.need("dataclasses", "dataclass")
    draft.need("typing", "Any")
    draft.need("torch.nn", "functional")
    draft.need("torch.distributed", "ProcessGroup")
    draft.need("torch.distributed._functional_collectives", "as collectives")
    found: list[object] = [ranks.PositionRanks, ranks.padded, ranks.wait_for]
    if exchange is AttentionExchange.GATHER:
        found.append(ranks.Gather)
    if exchange is not AttentionExchange.GATHER:
        draft.need("math", "")
    if exchange is AttentionExchange.ULYSSES:
        draft.need("collections.abc", "Iterable")
        found += [
            chunk_size,
            chunk_sizes,
            ranks.all_to_all_parts,
            ranks.to_heads,
            ranks.to_positions,
            ranks.ToHeads,
            ranks.ToPositions,
        ]
        found.append(sequences.group_query_heads)
    if exchange is AttentionExchange.RING:
        draft.need("collections.abc", "Callable")
        found += [sequences.Ring, sequences.BlockwiseSoftmax, sequences.RingAttention]
    draft.definitions += map(_source, (Sequence, *found, sequences.ShardedSequence, _kind(exchange)))


def _source(found: object) -> list[str]:
    """Return source without keyword-only dataclasses, equivcheck imports and lint comments."""
    text = "\n".join(source_of(found))
    for here, there in (
        (": AttentionHooks", ": Any"),
        ("  # noqa: ARG002 - of the base class", ""),
        ("Ring(ranks=self.ranks, attention=attention)", "Ring(self.ranks, attention)"),
    ):
        text = text.replace(here, there)
    return text.splitlines()
