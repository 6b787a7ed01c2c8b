"""Mistakes in modules that compute with one rank's part only: embeddings, norms, and heads repeated for other query heads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from equivcheck.diagnosis.mistake import Mistake, StepFacts
from equivcheck.diagnosis.mistakes.embeddings import look_up, wrong_lookups
from equivcheck.diagnosis.words import tensors
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.catalogue.function_modes import enter_in_forward
from equivcheck.user.diagnosis.diverged import DivergedTraining, held_indices, split_dim
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.ranks import build_model

MAX_MODULES = 16
"""Largest number of modules, or of groups of modules, to try."""


def wrong_embeddings(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield mistakes in embeddings whose rows are sharded over ranks.

    Examples: a rank does not mask tokens that belong to other ranks, or looks up the row next to the right one.
    """
    modules = build_model(diverged.task).named_modules()
    names = [name for name, module in modules if isinstance(module, nn.Embedding)][:MAX_MODULES]
    for axis in diverged.same_row_axes:
        for name in (name for name in names if split_dim(diverged, f"{name}.weight", axis) == 0):
            shards = held_indices(diverged, f"{name}.weight", axis, 0)
            if not torch.equal(torch.cat(shards), torch.arange(sum(map(len, shards)))):
                continue
            for words, rows in wrong_lookups(shards, f"{name}.weight", diverged.ranks_text((axis,))):
                yield Mistake(Cause.ANOTHER_ROW, words, partial(_replace_lookup, name=name, rows=rows), is_quick=True)


def _replace_lookup(ranks: EmulatedUserRanks, *, name: str, rows: torch.Tensor) -> None:
    for model in ranks.models:
        module: Any = model.get_submodule(name)
        module.forward = partial(look_up, module, rows)


def norms_of_parts(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield a possible mistake: norm layers normalize over one rank's features.

    Layers whose names differ only in numbers are tried together.
    """
    groups: dict[str, list[str]] = {}
    for name, module in build_model(diverged.task).named_modules():
        if _is_norm_of_features(module):
            groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    for axis in diverged.same_row_axes:
        for names in list(groups.values())[:MAX_MODULES]:
            words = f"each of {diverged.ranks_text((axis,))} normalizes over its own features in {tensors(names)}, not over all"
            change = partial(_normalize_parts, names=names, count=diverged.size((axis,)))
            yield Mistake(Cause.LOCAL_STATISTICS, words, change, is_quick=True)


def _is_norm_of_features(module: nn.Module) -> bool:
    sizes = {tuple(parameter.shape) for parameter in module._parameters.values() if parameter is not None}
    is_norm = "norm" in type(module).__name__.lower() and not isinstance(module, nn.modules.batchnorm._NormBase)
    return is_norm and not list(module.children()) and len(sizes) == 1 and len(sizes.pop()) == 1


def _normalize_parts(ranks: EmulatedUserRanks, *, names: list[str], count: int) -> None:
    for model in ranks.models:
        for name in names:
            module: Any = model.get_submodule(name)
            module.forward = partial(_normalized_parts, module, module.forward, count)


def _normalized_parts(module: Any, forward: Callable[..., Any], count: int, inputs: torch.Tensor) -> torch.Tensor:
    """Normalize each part of the features by itself, with its part of the parameters."""
    changed, shape = module.forward, getattr(module, "normalized_shape", None)
    module.forward = forward
    if shape is not None:
        module.normalized_shape = (shape[-1] // count,)
    try:
        outputs = []
        for number, part in enumerate(inputs.chunk(count, -1)):
            own = {name: value.chunk(count)[number] for name, value in module.named_parameters()}
            outputs.append(functional_call(module, own, (part,)))
        return torch.cat(outputs, -1)
    finally:
        module.forward = changed
        if shape is not None:
            module.normalized_shape = shape


def wrong_heads(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield possible mistakes: key and value heads are repeated in the wrong order.

    Two cases are tried for each axis: the order is wrong among all heads, or among the heads on each rank.
    """
    for axis in diverged.same_row_axes:
        for shards in (1, diverged.size((axis,))):
            where = "" if shards == 1 else f"on each of {diverged.ranks_text((axis,))}, "
            words = f"{where}key and value heads are repeated in the wrong order, so query heads use the wrong ones"
            yield Mistake(Cause.KV_HEADS, words, partial(_reorder_heads, shards=shards), is_quick=True)


def _reorder_heads(ranks: EmulatedUserRanks, *, shards: int) -> None:
    enter_in_forward(ranks, lambda _model: _ReorderedHeads(shards))


class _ReorderedHeads(TorchFunctionMode):
    """Function mode that reorders repeated heads in `scaled_dot_product_attention`, as if all heads were repeated together."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self._shards = shards

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call attention with other keys and values."""
        kwargs = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention and len(args) > 2 and args[0].dim() > 3:
            copies = args[0].shape[-3] // args[1].shape[-3]
            if copies > 1 and kwargs.pop("enable_gqa", False):
                args = (args[0], *(each.repeat_interleave(copies, -3) for each in args[1:3]), *args[3:])
            order = self._order(args[1])
            args = (args[0], *(each.index_select(-3, order) for each in args[1:3]), *args[3:])
        return func(*args, **kwargs)

    def _order(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the heads in the order in which each shard's distinct heads are repeated together.

        Equal neighbors are copies of one head.
        """
        heads = torch.arange(keys.shape[-3])
        is_new = [not at or not torch.equal(keys.select(-3, at), keys.select(-3, at - 1)) for at in heads.tolist()]
        distinct = heads[torch.tensor(is_new)]
        copies = len(heads) // len(distinct)
        if len(distinct) % self._shards or not torch.equal(distinct, heads[::copies]):
            return heads
        return torch.cat([part.repeat(copies) for part in distinct.chunk(self._shards)])
