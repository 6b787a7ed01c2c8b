"""Mistakes in attention: other masks, or keys and values without the gradients from other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.catalogue.function_modes import enter_in_forward
from equivcheck.user.diagnosis.diverged import DivergedTraining
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks

HIDDEN = -1e4
"""Scores up to this value hide a key, as torch's and transformers' masks do."""
Change = Callable[[torch.Tensor], torch.Tensor]
"""Function from a mask of the keys that each query should see to a mask of the keys that it does see.
Shape: (..., positions, positions)."""


def wrong_masks(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in attention masks: positions attend to other documents, or ranks ignore other ranks' positions."""
    words = "attention crosses the boundaries of packed documents: a position also attends to other documents in its row"
    yield Mistake(Cause.ATTENTION_MASK, words, partial(_change_masks, change=without_documents))
    for axis in diverged.same_row_axes:
        count, where = diverged.size((axis,)), diverged.ranks_text((axis,))
        words = f"each rank's attention sees only its own positions: keys and values of the other {axis} ranks are missing"
        yield Mistake(Cause.ATTENTION_MASK, words, partial(_change_masks, change=partial(within_ranks, count=count)))
        words = f"each of {where} applies the attention mask as if its own positions were the first"
        yield Mistake(Cause.ATTENTION_MASK, words, partial(_change_masks, change=partial(from_first_position, count=count)))


def lost_key_gradients(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: keys and values get no gradients from queries on other ranks."""
    for axis in diverged.same_row_axes:
        words = f"keys and values get no gradients from the queries of the other {axis} ranks"
        change = partial(_keep_local_keys, count=diverged.size((axis,)))
        yield Mistake(Cause.KEY_VALUE_GRADIENT, words, change, is_quick=True)


def without_documents(visible: torch.Tensor) -> torch.Tensor:
    """Return a mask in which positions also see other documents in their row.

    If the mask does not separate documents, it is returned unchanged.
    """
    first, is_used = visible.int().argmax(-1), visible.any(-1)
    is_causal = not visible.triu(1).any()
    all_ = torch.ones_like(visible).tril() if is_causal else torch.ones_like(visible)
    used = is_used[..., None] & visible.any(-2, keepdim=True) & all_
    documents = (first[..., None] == first[..., None, :]) & used
    return used if torch.equal(documents, visible) else visible


def within_ranks(visible: torch.Tensor, *, count: int) -> torch.Tensor:
    """Return a mask in which queries see only keys on their own rank, if the positions are sharded over `count` ranks."""
    owner = torch.arange(visible.shape[-1]) * count // visible.shape[-1]
    return visible & (owner[:, None] == owner)


def from_first_position(visible: torch.Tensor, *, count: int) -> torch.Tensor:
    """Return a mask in which each rank's queries use the mask of the first rank's queries.

    Then each rank computes as if its own positions were the first. Positions are sharded over `count` ranks.
    """
    size = visible.shape[-1]
    return visible if size % count else visible[..., torch.arange(size) % (size // count), :]


def _change_masks(ranks: EmulatedUserRanks, *, change: Change) -> None:
    enter_in_forward(ranks, lambda _model: ChangedMasks(change))


def _keep_local_keys(ranks: EmulatedUserRanks, *, count: int) -> None:
    enter_in_forward(ranks, lambda _model: _LocalKeys(count))


class ChangedMasks(TorchFunctionMode):
    """Torch function mode that changes attention masks.

    Masks are found in the arguments of attention, and in `masked_fill`, `where` and additions.
    """

    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with a changed mask if it uses a mask for square attention scores."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if name == "masked_fill" and len(args) == 3 and _is_low(args[2]) and _is_mask(args[1], args[0]):
            args = (args[0], ~self._change(~args[1]), args[2])
        elif name == "where" and len(args) == 3 and _is_low(args[2]) and _is_mask(args[0], args[1]):
            args = (self._change(args[0]), *args[1:])
        elif name in ("add", "iadd") and len(args) == 2 and _is_added(args[1], args[0]):
            args = (args[0], self._added(args[1]))
        return func(*args, **kwargs)

    def _attention(self, query: torch.Tensor, key: torch.Tensor, *others: Any, **keywords: Any) -> torch.Tensor:
        given = dict(zip(("value", "attn_mask", "dropout_p", "is_causal"), others, strict=False)) | keywords
        mask: Any = given.get("attn_mask")
        scores = query.new_empty(()).expand(query.shape[-2], key.shape[-2])
        if mask is None and scores.shape[0] == scores.shape[1] > 1:
            ones = torch.ones(scores.shape, dtype=torch.bool)
            given["attn_mask"], given["is_causal"] = self._change(ones.tril() if given.get("is_causal") else ones), False
        elif _is_mask(mask, scores):
            given["attn_mask"] = self._change(mask)
        elif _is_added(mask, scores):
            given["attn_mask"] = self._added(mask)
        return functional.scaled_dot_product_attention(query, key, **given)

    def _added(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(self._change(mask > HIDDEN), torch.zeros_like(mask), mask.min())


class _LocalKeys(TorchFunctionMode):
    """Function mode in which `scaled_dot_product_attention` gives keys and values gradients from queries on their rank only."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Attend rank by rank, each with its own queries."""
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention or len(args) < 3 or args[0].shape[-2] != args[1].shape[-2]:
            return func(*args, **kwargs)
        given = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False)) | kwargs
        size = args[0].shape[-2]
        if given.pop("is_causal", False):
            given["attn_mask"] = torch.ones(size, size, dtype=torch.bool).tril()
        mask, owner = given.pop("attn_mask", None), torch.arange(size) * self._count // size
        outputs = []
        for rank in range(self._count):
            mine = (owner == rank)[:, None]
            key, value = (torch.where(mine, each, each.detach()) for each in args[1:3])
            rows = None if mask is None else mask[..., owner == rank, :]
            outputs.append(func(args[0][..., owner == rank, :], key, value, attn_mask=rows, **given))
        return torch.cat(outputs, -2)


def _is_low(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return is_number and float(value) <= HIDDEN


def _is_square(mask: Any, scores: Any) -> bool:
    are_tensors = isinstance(mask, torch.Tensor) and isinstance(scores, torch.Tensor) and min(mask.dim(), scores.dim()) > 1
    return are_tensors and mask.shape[-1] == mask.shape[-2] > 1 and mask.shape[-2:] == scores.shape[-2:]


def _is_mask(mask: Any, scores: Any) -> bool:
    return _is_square(mask, scores) and mask.dtype is torch.bool


def _is_added(mask: Any, scores: Any) -> bool:
    """Return whether a mask contains only zeros and low values, so that it can be added to scores."""
    if not _is_square(mask, scores) or not mask.is_floating_point():
        return False
    return bool(((mask == 0.0) | (mask <= HIDDEN)).all()) and bool((mask <= HIDDEN).any())
