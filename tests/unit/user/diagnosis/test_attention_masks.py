"""Attention masks that ranks get wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from equivcheck import Outcome, check_training
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.catalogue.tokens.attention import (
    ChangedMasks,
    from_first_position,
    within_ranks,
    without_documents,
)
from unit.user.programs import brought, sgd_of

LENGTH = 6
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 1]])


class Attention(nn.Module):
    """Causal attention within documents. `sees` may change the mask on ranks."""

    sees: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda visible: visible)

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.head = nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        """Attend with keys of all ranks, from this rank's positions."""
        query, key, value = self.projection(inputs).chunk(3, -1)
        first, size = 0, inputs.shape[1]
        if dist.is_initialized():
            key, value = (_Gather.apply(part) for part in (key, value))
            documents = torch.cat(_all(documents), 1)
            first = dist.get_rank() * size
        visible = self.sees(CAUSAL & (documents[:, :, None] == documents[:, None]))[:, first : first + size]
        scores = (query @ key.transpose(1, 2)).masked_fill(~visible, float("-inf"))
        return self.head(scores.softmax(-1) @ value)


def _all(part: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return parts


class _Gather(torch.autograd.Function):
    """Concatenate all ranks' positions; in backward, sum the gradients of this rank's positions."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor) -> torch.Tensor:
        context.size = part.shape[1]
        return torch.cat(_all(part), 1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.split(context.size, 1)[dist.get_rank()].contiguous()


def part_of(batch: Any, mesh: DeviceMesh) -> Any:
    """This rank's positions."""
    (inputs, documents), targets = batch
    inputs, documents, targets = (each.chunk(2, 1)[mesh.get_rank()] for each in (inputs, documents, targets))
    return (inputs, documents), targets


def batches() -> list[Any]:
    """Two steps with two rows."""
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(2, 2, LENGTH, 4, generator=generator), torch.randn(2, 2, LENGTH, 2, generator=generator)
    return [((each, DOCUMENTS), wanted) for each, wanted in zip(inputs, targets, strict=True)]


@pytest.mark.parametrize(
    ("sees", "cause"),
    [
        (lambda visible: CAUSAL.expand(visible.shape), "attention crosses the boundaries of packed documents"),
        (
            partial(within_ranks, count=2),
            "each rank's attention sees only its own positions: keys and values of the other cp ranks",
        ),
        (partial(from_first_position, count=2), "each of the 2 cp ranks applies the attention mask as if its own positions were"),
        (lambda visible: visible & (torch.rand(visible.shape) > 2) | torch.eye(LENGTH, dtype=torch.bool), ""),
    ],
    ids=["documents", "own_positions", "first_positions", "only_itself"],
)
def test_a_wrong_mask_is_named(sees: Callable[[torch.Tensor], torch.Tensor], cause: str) -> None:
    """No cause is named for masks outside the catalogue."""

    def parallelize(model: Any, _mesh: DeviceMesh) -> nn.Module:
        model.sees = sees
        return DistributedDataParallel(model)

    given = {"mesh": {"cp": 2}, "shard": part_of, "batches": batches(), "optimizer": sgd_of}
    verdict = check_training(**brought(model=Attention, parallelize=parallelize, **given))
    assert verdict.cause.startswith(cause)
    assert verdict.kinds == ((Cause.ATTENTION_MASK,) if cause else ())


class _GatherOwn(torch.autograd.Function):
    """Concatenate all ranks' positions; in backward, keep only the gradients from this rank's queries."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor) -> torch.Tensor:
        context.size = part.shape[1]
        return torch.cat(_all(part), 1)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.split(context.size, 1)[dist.get_rank()].contiguous()


class FusedAttention(Attention):
    """Causal attention by torch's function."""

    gathers = _Gather

    def forward(self, inputs: torch.Tensor, _documents: torch.Tensor) -> torch.Tensor:
        """Attend with keys of all ranks, from this rank's positions."""
        query, key, value = self.projection(inputs).chunk(3, -1)
        if not dist.is_initialized():
            return self.head(functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        key, value, first = self.gathers.apply(key), self.gathers.apply(value), dist.get_rank() * inputs.shape[1]
        mask = CAUSAL[first : first + inputs.shape[1]]
        return self.head(functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))


@pytest.mark.parametrize(("gathers", "kinds"), [(_Gather, ()), (_GatherOwn, (Cause.KEY_VALUE_GRADIENT,))])
def test_keys_without_gradients_from_other_ranks_are_named(
    gathers: type[torch.autograd.Function], kinds: tuple[Cause, ...]
) -> None:
    """Ring attention loses them if it communicates in forward only."""

    def parallelize(model: Any, _mesh: DeviceMesh) -> nn.Module:
        model.gathers = gathers
        return DistributedDataParallel(model)

    given = {"mesh": {"cp": 2}, "shard": part_of, "batches": batches(), "optimizer": sgd_of}
    verdict = check_training(**brought(model=FusedAttention, parallelize=parallelize, **given))
    assert (verdict.kinds, verdict.outcome is Outcome.EQUIVALENT) == (kinds, not kinds)
    if kinds:
        assert verdict.cause == "keys and values get no gradients from the queries of the other cp ranks"
        # A rank's loss is the mean over its positions, so the right gradients before it are two times those on one device.
        assert verdict.where.startswith("first module whose output gradient differs: projection")


VISIBLE = CAUSAL & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])


def _filled(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~visible, -1e9).softmax(-1)


def _selected(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return torch.where(visible, scores, torch.finfo(scores.dtype).min).softmax(-1)


def _added(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return (scores + torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))).softmax(-1)


def _as_argument(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(LENGTH).expand(2, LENGTH, LENGTH)
    return functional.scaled_dot_product_attention(scores, eye, eye, attn_mask=visible, scale=1.0)


def _as_added_argument(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    eye, mask = torch.eye(LENGTH).expand(2, LENGTH, LENGTH), torch.zeros(visible.shape)
    return functional.scaled_dot_product_attention(scores, eye, eye, mask.masked_fill_(~visible, -1e9), scale=1.0)


@pytest.mark.parametrize("attend", [_filled, _selected, _added, _as_argument, _as_added_argument])
def test_masks_are_changed_in_each_form(attend: Callable[..., torch.Tensor]) -> None:
    """Masks are filled in, selected, added or passed."""
    scores = torch.randn(2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
    with ChangedMasks(without_documents):
        changed = attend(scores, VISIBLE)
    torch.testing.assert_close(changed, attend(scores, CAUSAL.expand(VISIBLE.shape)))


def test_a_causal_flag_becomes_a_mask() -> None:
    """Attention without a mask can be limited as well."""
    given = torch.randn(3, 2, LENGTH, 4, generator=torch.Generator().manual_seed(0))
    with ChangedMasks(partial(within_ranks, count=2)):
        changed = functional.scaled_dot_product_attention(*given, is_causal=True)
    own = CAUSAL.clone()
    own[3:, :3] = False
    torch.testing.assert_close(changed, functional.scaled_dot_product_attention(*given, attn_mask=own))


def test_masks_of_other_kinds_have_no_documents() -> None:
    """A sliding window is left as it is; padding stays hidden."""
    window = CAUSAL & CAUSAL.T.roll(2, 0).triu(-2)
    assert torch.equal(without_documents(window), window)
    both_ways = DOCUMENTS[:, :, None] == DOCUMENTS[:, None]
    assert bool(without_documents(both_ways).all())
    padded = VISIBLE.clone()
    padded[:, 5], padded[:, :, 5] = False, False
    expected = CAUSAL.expand(VISIBLE.shape).clone()
    expected[:, 5], expected[:, :, 5] = False, False
    assert torch.equal(without_documents(padded), expected)
