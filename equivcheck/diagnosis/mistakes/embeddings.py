"""Embeddings with rows split over ranks that look up wrong rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional

NO_ROW = -1
"""Stands for zeros in place of a row."""


def wrong_lookups(shards: Sequence[torch.Tensor], name: str, where: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield mistakes in a sharded embedding: a phrase, and the indices of the rows that each token then looks up.

    The indices have shape (rows per token, vocabulary), and a token is embedded as the sum of its rows. `shards` has each rank's
    row indices, `name` is the weight's name, and `where` describes the ranks.
    """
    shards = [shard for shard in shards if len(shard)]
    tokens = torch.cat(list(shards))
    firsts, lasts = (torch.stack([shard[place] for shard in shards]) for place in (0, -1))
    bounds = list(zip(firsts.tolist(), lasts.tolist(), strict=True))
    unmasked = f"{where} do not mask each other's tokens: each looks them up in the"
    rows = torch.stack([torch.where((tokens >= first) & (tokens <= last), tokens, first) for first, last in bounds])
    yield f"{unmasked} first row of its own shard of `{name}`", rows
    rows = torch.stack([tokens.clamp(first, last) for first, last in bounds])
    yield f"{unmasked} nearest row of its own shard of `{name}`", rows
    rows = torch.stack([(tokens - first) % (last - first + 1) + first for first, last in bounds])
    yield f"{unmasked} row of its own shard of `{name}` at (token - first token of the shard) modulo the shard's size", rows
    for place, lost in (("last", lasts), ("first", firsts)):
        words = f"the {place} token of each vocabulary shard of `{name}` on {where} is embedded as 0"
        yield words, tokens.masked_fill(torch.isin(tokens, lost), NO_ROW)[None]
    for shift, which, fixed in ((-1, "before", firsts), (1, "after", lasts)):
        words = f"from the second of {where} on, tokens are looked up in the row of `{name}` {which} theirs"
        is_right = (tokens <= lasts[0]) | torch.isin(tokens, fixed)
        yield words, torch.where(is_right, tokens, tokens + shift)[None]


def look_up(embedding: nn.Embedding, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Embed each token as the sum of its rows in the embedding's weight.

    `rows` has each token's row indices, with shape (rows per token, vocabulary). The index `NO_ROW` stands for a row of zeros.
    """
    chosen = rows[:, tokens]
    padding = embedding.padding_idx if len(rows) == 1 else None
    found = functional.embedding(chosen.clamp(min=0), embedding.weight, padding)
    outputs = torch.where((chosen == NO_ROW)[..., None], 0.0, found).sum(0)
    if embedding.padding_idx is None or len(rows) == 1:
        return outputs
    return outputs.where((tokens != embedding.padding_idx)[..., None], outputs.detach())
