"""Positions of sequences cut over ranks that are counted, masked, labelled, looked at or added up otherwise."""

from __future__ import annotations

import re

import torch

from equivcheck.export.bugs.snippet import Snippet, each_gradient
from equivcheck.export.bugs.token_layers import rewritten
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.text import block, indented
from equivcheck.layouts.parallelisms.context_parallel.positions import positions_of_ranks
from equivcheck.scenario import ContextParallel, CrossEntropy
from equivcheck.scenario.mesh import CP
from equivcheck.training.material import count_labels, material

_PLACED = "self.sequence.positions(query.shape[-2], query.device)"


def _lines(position: LoopPosition, *lines: str, first: bool = False) -> Snippet:
    """Lines at a position of the loop, after those that are there or before them; `{dim}` is that of positions."""

    def plant(draft: Draft) -> None:
        dim = 1 - draft.scenario.training.data.batch_dim
        written = draft.lines[position]
        at = 0 if first else len(written)
        written[at:at] = [line.format(dim=dim) for line in lines]

    return plant


def _unseen(function: str, *before: str, causal: bool = True) -> Snippet:
    """Let each layer of attention, or only causal ones, mask by another function."""
    condition = 'hasattr(layer, "unseen")' + " and layer.unseen(ranks.own, ranks.own) is not None" * causal
    return _lines(
        LoopPosition.WRAP, *before, "for layer in model.modules():", f"    if {condition}:", f"        layer.unseen = {function}"
    )


def _defined(here: str, there: str) -> Snippet:
    """Other text in what a script has of an exchange."""

    def plant(draft: Draft) -> None:
        changed = [[re.sub(here, there, line) for line in lines] for lines in draft.definitions]
        if changed == draft.definitions:
            raise refuse("the mutant", "no exchange of the script has what it changes")
        draft.definitions = changed

    return plant


def _counted_by_part(draft: Draft) -> None:
    training, size = draft.scenario.training, draft.scenario.layout.mesh.size(CP)
    loss, dim = training.loss, 1 - training.data.batch_dim
    assert isinstance(loss, CrossEntropy), "it was chosen for its labels"
    (parallelism,) = draft.scenario.layout.of(ContextParallel)
    parts = [torch.tensor(part, dtype=torch.int64) for part in positions_of_ranks(parallelism, training.model.length or 1, size)]
    table = [
        [
            size
            * (sum(count_labels(loss, training.model.outputs, batch.targets.index_select(dim, part)) for batch in step) or 1.0)
            for part in parts
        ]
        for step in material(training).steps
    ]
    draft.definitions.append([f"DIVISORS = {table}  # per step and rank"])
    draft.add(LoopPosition.SCALE, "loss = loss * COUNTED[step] / DIVISORS[step][ranks.index]")


def _of_own_positions(draft: Draft) -> None:
    gradients = "[None if each.grad is None else each.grad.clone() for each in model.parameters()]"
    draft.lines[LoopPosition.BEFORE_READING][:0] = [f"own = {gradients}  # of this rank's positions"]
    lines = block("if kept is not None:", ["parameter.grad.copy_(kept)"])
    draft.add(LoopPosition.BEFORE_READING, *block("for parameter, kept in zip(model.parameters(), own):", lines))


def _averaged(draft: Draft) -> None:
    lines = each_gradient(draft, "parameter.grad /= ranks.size")
    draft.add(LoopPosition.BEFORE_READING, "with torch.no_grad():", *indented(lines))


def _summed_each_microbatch(draft: Draft) -> None:
    draft.needs_number = True
    lines = each_gradient(draft, "dist.all_reduce(parameter.grad, group=ranks.group)")
    draft.add(LoopPosition.TAKE, *block("if number > 0:", lines))


SNIPPETS: dict[str, Snippet] = {
    "rotary_positions_of_own_part": rewritten(
        lambda line: line.replace(_PLACED, f"torch.arange(query.shape[-2]) if self.is_wrong else {_PLACED}")
    ),
    "learned_positions_of_own_part": _lines(
        LoopPosition.WRAP,
        "model.positions.register_forward_pre_hook(lambda _, inputs: (torch.arange(len(inputs[0])),), prepend=True)",
    ),
    "causal_mask_by_order_of_ranks": _unseen(
        "lambda queries, keys: later[queries][:, keys]",
        "places = torch.cat(ranks.parts).argsort()",
        "later = places > places[:, None]",
    ),
    "causal_mask_counted_in_own_part": _unseen("lambda queries, keys: keys > torch.arange(len(queries))[:, None]"),
    "ring_blocks_masked_alike": _unseen("lambda queries, keys: torch.arange(len(keys)) > torch.arange(len(queries))[:, None]"),
    "labels_shifted_after_cut": _lines(LoopPosition.TAKE, "targets = targets.roll(-1, {dim})"),
    "labels_cut_in_a_row": _lines(
        LoopPosition.TAKE,
        "targets = torch.empty_like(targets).index_copy({dim}, torch.cat(ranks.parts), targets)",
        first=True,
    ),
    "own_positions_looked_at_alone": _lines(
        LoopPosition.WRAP,
        "def look_alone(looks, query, key, value):",
        "    unseen = looks.unseen(ranks.own, ranks.own)",
        "    return looks.attend_from(query, looks.grouped(key), looks.grouped(value), unseen)",
        "for layer in model.modules():",
        '    if hasattr(layer, "sequence"):',
        "        layer.sequence.attended = look_alone",
    ),
    "ring_ends_before_last_block": _unseen(
        "skipping(layer.unseen)",
        "last = ranks.parts[(ranks.index + 1) % ranks.size]",
        "def skipping(unseen):",
        "    all_of_last = torch.ones(len(ranks.own), len(last), dtype=torch.bool)",
        "    return lambda queries, keys: all_of_last if torch.equal(keys, last) else unseen(queries, keys)",
        causal=False,
    ),
    "key_gradients_sliced_not_reduced": _lines(
        LoopPosition.WRAP,
        "Gather.backward = staticmethod(lambda ctx, gradient: (gradient.index_select(-2, ctx.ranks.own), None))",
    ),
    "ring_gradients_overwritten": _defined(r"of_(key|value) \+= ", r"of_\1[:] = "),
    "heads_returned_in_another_order": _defined(
        r"back\.flatten\(1, 2\)", "back.roll(chunk_sizes(units, self.ranks.size)[0], 1).flatten(1, 2)"
    ),
    "keys_left_in_order_of_ranks": _defined(
        r"gathered\.unbind\(\)", "gathered.index_select(-2, torch.cat(self.ranks.parts)).unbind()"
    ),
    "means_of_unequal_parts_averaged": _lines(LoopPosition.SCALE, "loss = loss * (ranks.length / (len(ranks.own) * ranks.size))"),
    "labels_counted_by_each_part": _counted_by_part,
    "gradients_of_own_positions": _of_own_positions,
    "gradients_averaged_over_parts": _averaged,
    "parts_summed_each_microbatch": _summed_each_microbatch,
}
"""By the name of the mutant."""
