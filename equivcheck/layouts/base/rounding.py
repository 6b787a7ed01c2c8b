"""When a layout reduces gradients, and what it rounds to other element types, as data: the reference does the same.

Of a layout that rounds, ranks compute on parts of a microbatch and each part's gradients are rounded before they are added up, so
what one device computes on whole microbatches is another number. Its reference computes part by part.
"""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.scenario import FSDP1, FSDP2, ElementType, LowPrecision, MixedPrecision, Precision
from equivcheck.system.choice import Choice
from equivcheck.system.torch_version import torch_in

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the element type's name in torch."""


FULLY_SHARD_WITHOUT_GRAD_DTYPE = "<2.15"
"""Versions whose `fully_shard` rounds gradients to the element type that is computed in and by default reduces them in it.

Later ones leave gradients in the type of their reduction (`Tensor.grad_dtype`), by default that of the parameters."""


def computed_in(precision: Precision, policy: MixedPrecision | None) -> ElementType:
    """What a unit of FSDP computes in."""
    return ElementType(precision.value) if policy is None or policy.param is None else policy.param


def reduced_in(precision: Precision, fsdp: FSDP1 | FSDP2) -> ElementType:
    """What a unit of FSDP reduces gradients in, and accumulates those that wait for a reduction."""
    policy = fsdp.mixed_precision
    if policy is not None and policy.reduce is not None:
        return policy.reduce
    if isinstance(fsdp, FSDP2) and not torch_in(FULLY_SHARD_WITHOUT_GRAD_DTYPE):
        return ElementType(precision.value)
    return computed_in(precision, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhenReduced:
    """When gradients of several microbatches are reduced."""

    once: bool = False
    """Whether only the last microbatch is followed by a reduction, of what all have left."""
    whole: bool = False
    """Whether ranks keep whole gradients, so that a reduction takes the result of the one before it along."""


EACH = WhenReduced()
"""After each microbatch, what that adds: ranks keep shards of what has been reduced."""
WHOLE = WhenReduced(whole=True)
"""After each microbatch, all that there is by then."""
ONCE = WhenReduced(once=True, whole=True)
"""After the last microbatch, all that there is."""


class Division(Choice):
    """When a sum over parts is divided: by their number, which makes it a mean, or by another divisor."""

    BEFORE = "before"
    """Each part is divided before the sum."""
    SCALED = "scaled"
    """Each part is multiplied by the reciprocal of the divisor before the sum."""
    AROUND = "around"
    """Each part is divided by a power of two near the square root of the divisor, the sum by the rest."""
    AFTER = "after"
    """The sum of the first stage is divided by the number of its summands, that of the second by the rest of the divisor."""
    LAST = "last"
    """The sum of all is divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Which element types a step passes through on its way to gradients, and in what order."""

    replicas: int
    """Data-parallel ranks along the outer axis: over them runs the second stage of a reduction; 1 without one."""
    shards: int
    """Data-parallel ranks along the inner axis, whose gradients are added up first."""
    compute: ElementType | None = None
    """What parameters, inputs and masks are cast to; None leaves them."""
    output: ElementType | None = None
    """What the model's output is cast to; None leaves it."""
    autocast: LowPrecision | None = None
    """What `torch.autocast` casts to around forward and loss; None for no autocast."""
    reduce: ElementType | None = None
    """What gradients are added up in; None for the type that they have by then."""
    division: Division = Division.BEFORE
    """When the sum is divided."""
    division_again: Division | None = None
    """The same of gradients that have been reduced before and were kept; None if these are no exception."""
    divisor: float | None = None
    """What it is divided by, of losses that have been multiplied by as much; None for the number of parts."""
    when: WhenReduced = EACH
    """When gradients of several microbatches are reduced."""
    accumulates_reduced: bool = False
    """Whether gradients that wait for a reduction wait in its element type, not in the one that they were computed in."""
    grad_dtype: bool = False
    """Whether backward leaves gradients in the element type of their reduction, not first in that of `compute`."""
    replicas_once: bool = False
    """Whether sums of the first stage are added up over microbatches, and the second is that of the last microbatch alone."""

    @property
    def num_parts(self) -> int:
        """Parts of a microbatch, one a data-parallel rank."""
        return self.replicas * self.shards

    @property
    def gradient_scale(self) -> float:
        """Factor of each part's loss in backward, so that gradients come out as if divided by the number of parts."""
        return 1.0 if self.divisor is None else self.divisor / self.num_parts

    @property
    def element_types(self) -> tuple[str, ...]:
        """The element types that it names."""
        return tuple(kind.value for kind in (self.compute, self.output, self.autocast, self.reduce) if kind is not None)
