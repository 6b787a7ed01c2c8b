"""When a layout reduces gradients and which element types it rounds to, so that the single-device run can round in the same way.

Ranks compute gradients on parts of a microbatch and round each part before the sum. Gradients over the whole microbatch would
round differently, so the single-device run computes part by part too.
"""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.scenario import FSDP1, FSDP2, ElementType, LowPrecision, MixedPrecision, Precision
from equivcheck.system.choice import PrintableEnum
from equivcheck.system.torch_version import is_torch_in

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element, by torch's name for the element type."""


FULLY_SHARD_WITHOUT_GRAD_DTYPE = "<2.15"
"""Versions whose `fully_shard` rounds gradients to the compute dtype, and reduces them in it by default.

Later versions leave gradients in the reduction dtype (`Tensor.grad_dtype`), by default the parameters' dtype."""


def computed_in(precision: Precision, policy: MixedPrecision | None) -> ElementType:
    """Dtype in which an FSDP unit computes: the parameters' dtype in the mixed-precision `policy`, else the training's."""
    return ElementType(precision.value) if policy is None or policy.param is None else policy.param


def reduced_in(precision: Precision, fsdp: FSDP1 | FSDP2) -> ElementType:
    """Dtype in which FSDP units accumulate and reduce gradients, given the training's precision."""
    policy = fsdp.mixed_precision
    if policy is not None and policy.reduce is not None:
        return policy.reduce
    if isinstance(fsdp, FSDP2) and not is_torch_in(FULLY_SHARD_WITHOUT_GRAD_DTYPE):
        return ElementType(precision.value)
    return computed_in(precision, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhenReduced:
    """When the gradients from several microbatches are reduced over ranks."""

    once: bool = False
    """Whether only the last microbatch is followed by a reduction, over all accumulated gradients."""
    whole: bool = False
    """Whether ranks keep full gradients. Each reduction then adds to the previous result."""


EACH = WhenReduced()
"""Reduce each microbatch's gradients. Ranks keep the reduced shards."""
WHOLE = WhenReduced(whole=True)
"""Reduce after each microbatch, including gradients reduced before."""
ONCE = WhenReduced(once=True, whole=True)
"""Reduce all accumulated gradients after the last microbatch."""


class Division(PrintableEnum):
    """When a sum over data-parallel ranks is divided by the number of ranks or another divisor."""

    BEFORE = "before"
    """Each summand is divided before the sum is computed."""
    SCALED = "scaled"
    """Each summand is multiplied by the divisor's reciprocal before the sum."""
    AROUND = "around"
    """Each summand is divided by a power of two near the divisor's square root, and the sum by the rest of the divisor."""
    AFTER = "after"
    """The first reduction's sum is divided by its number of summands, and the second reduction's sum by the rest of the divisor.
    """
    LAST = "last"
    """The final sum is divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Dtypes to which a layout rounds, in the order in which gradients pass through them."""

    replicas: int
    """Data-parallel ranks along the outer axis, which a second reduction stage sums over. 1 without an outer axis."""
    shards: int
    """Data-parallel ranks along the inner axis, which the first reduction stage sums over."""
    compute: ElementType | None = None
    """Element type to which parameters, inputs and masks are cast. None for no cast."""
    keeps_norms: bool = False
    """Whether weights and biases of norms are not cast to `compute`."""
    output: ElementType | None = None
    """Element type to which the model's output is cast. None for no cast."""
    autocast: LowPrecision | None = None
    """Element type for `torch.autocast` around forward and loss. None for no autocast."""
    reduce: ElementType | None = None
    """Element type for the sum over ranks. None for the type that gradients already have."""
    division: Division = Division.BEFORE
    """When the sum is divided."""
    division_again: Division | None = None
    """When the sum is divided for gradients already reduced before. None for the same as `division`."""
    divisor: float | None = None
    """Divisor for gradient sums, if losses are multiplied by the same factor. None for the number of ranks."""
    when: WhenReduced = EACH
    """When gradients from several microbatches are reduced."""
    accumulates_reduced: bool = False
    """Whether gradients accumulate in the reduction's dtype, instead of their own dtype."""
    grad_dtype: bool = False
    """Whether backward directly computes gradients in the reduction's dtype, instead of first in `compute`."""
    replicas_once: bool = False
    """Whether first-stage sums accumulate over microbatches, and the second stage runs only after the last microbatch."""

    @property
    def num_parts(self) -> int:
        """Number of parts into which data-parallel ranks split a microbatch: one part for each rank."""
        return self.replicas * self.shards

    @property
    def gradient_scale(self) -> float:
        """Factor by which each rank's loss is multiplied before backward.

        It compensates for `divisor`: the sum over ranks, divided by `divisor`, is then the mean over ranks.
        """
        return 1.0 if self.divisor is None else self.divisor / self.num_parts

    @property
    def element_types(self) -> tuple[str, ...]:
        """Names for all dtypes to which the layout rounds."""
        return tuple(kind.value for kind in (self.compute, self.output, self.autocast, self.reduce) if kind is not None)
