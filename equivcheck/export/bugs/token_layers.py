"""Attention, embeddings and tied heads that compute otherwise on ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

from equivcheck.export.bugs.snippet import Snippet, flagged
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.scenario import LocalTensorParallel
from equivcheck.scenario.mesh import TP

_REPEATED = r"(\w+)\.repeat_interleave\((\d+), -3\)"
"""Heads of key and value repeated for those of the query: what, and how often."""


def rewritten(change: Callable[[str], str]) -> Snippet:
    """Let lines of layers be others, which compute otherwise where ``self.is_wrong`` is set."""

    def plant(draft: Draft) -> None:
        flagged(draft, [tuple(map(change, lines)) for lines in draft.form.classes])

    return plant


def _replaced(*changes: tuple[str, str]) -> Snippet:
    """Patterns in lines of layers, and what stands for them."""

    def change(line: str) -> str:
        for pattern, other in changes:
            line = re.sub(pattern, other, line)
        return line

    return rewritten(change)


def _planted(*lines: str) -> Snippet:
    """Lines before anything is wrapped."""

    def plant(draft: Draft) -> None:
        if draft.scenario.layout.has(LocalTensorParallel):
            raise refuse("the mutant", "under local_tensor_parallel modules are replaced by others")
        draft.need("torch.nn", "functional")
        draft.lines[LoopPosition.WRAP][:0] = list(lines)

    return plant


def _hooked(line: str) -> Snippet:
    """A hook on a module that tensor parallelism has been applied to: `{ranks}`, and positions of each rank's `{part}`."""

    def plant(draft: Draft) -> None:
        ranks = draft.scenario.layout.mesh.size(TP)
        if ranks > 1:
            part = (draft.scenario.training.model.length or 1) // ranks
            draft.add(LoopPosition.WRAP, line.format(ranks=ranks, part=part, others=ranks - 1))

    return plant


_HEAD = 'head = model.get_submodule("head.linear")'
SNIPPETS: dict[str, Snippet] = {
    "causal_mask_lost": _replaced(
        (r"scores\.masked_fill\(later, -torch\.inf\)", r"scores if self.is_wrong else \g<0>"),
        ("is_causal=True", "is_causal=not self.is_wrong"),
    ),
    "kv_heads_repeated_in_another_order": _replaced(
        (_REPEATED, r"\1.repeat(1, \2, 1, 1) if self.is_wrong else \g<0>"),
    ),
    "kv_gradient_of_one_copy": _replaced(
        (_REPEATED, r"torch.stack([\1, *[\1.detach()] * (\2 - 1)], -3).flatten(-4, -3) if self.is_wrong else \g<0>"),
    ),
    "kv_gradients_averaged": _replaced(
        (_REPEATED, r"(\1.detach() + (\1 - \1.detach()) / \2 if self.is_wrong else \1).repeat_interleave(\2, -3)"),
    ),
    "padding_row_trained": _planted("model.embedding.padding_idx = None"),
    "tied_head_without_gradient": _planted(
        _HEAD, "head.forward = lambda values: functional.linear(values, head.weight.detach(), head.bias)"
    ),
    "tied_embedding_without_gradient": _planted(
        "table = model.embedding",
        "table.forward = lambda tokens: functional.embedding(tokens, table.weight.detach(), table.padding_idx)",
    ),
    "tied_head_left_behind": _planted(
        _HEAD,
        "first = []  # the values of its weight when it was first used",
        "def left_behind(values):",
        "    first.extend([] if first else [head.weight.detach().clone()])",
        "    return functional.linear(values, head.weight + (first[0] - head.weight).detach(), head.bias)",
        "head.forward = left_behind",
    ),
    "learned_positions_counted_from_parts": _hooked(
        "model.positions.register_forward_pre_hook(lambda _, inputs: (inputs[0] % {part},), prepend=True)"
    ),
    "positions_added_on_every_rank": _hooked(
        "model.positions.register_forward_hook(lambda _, inputs, outputs: outputs + {others} * outputs.detach())"
    ),
    "logits_gradient_summed": _hooked(
        'model.get_submodule("head.linear").register_forward_hook('
        "lambda _, inputs, logits: logits.register_hook(lambda gradient: gradient * {ranks}) and None)"
    ),
}
"""By the name of the mutant."""
