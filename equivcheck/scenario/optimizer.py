"""One class per optimizer in `torch.optim`, with torch's field names.

LBFGS is left out because its `step` calls the model repeatedly during line search. SparseAdam is left out because no model here
has sparse gradients.
"""

from __future__ import annotations

import math
from typing import ClassVar

from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between, require_not_negative, require_positive
from equivcheck.system.choice import PrintableEnum


class Implementation(PrintableEnum):
    """Implementation of the update in torch."""

    FOR_LOOP = "for_loop"
    FOREACH = "foreach"
    FUSED = "fused"


@frozen_dataclass
class Optimizer:
    """Base class for optimizers; each subclass is named like its class in `torch.optim`."""

    has_fused: ClassVar[bool] = False
    """Whether torch has a fused implementation on CPU."""
    has_foreach: ClassVar[bool] = True
    """Whether torch has a foreach implementation."""
    has_maximize: ClassVar[bool] = True
    """Whether the optimizer supports `maximize`."""
    elementwise: ClassVar[bool] = True
    """Whether each element's update depends only on that element's gradient and value."""
    updates_vectors: ClassVar[bool] = True
    """Whether the optimizer accepts parameters with one dim."""
    decays: ClassVar[bool] = True
    """Whether the optimizer supports weight decay."""
    without_dtensor: ClassVar[tuple[Implementation, ...]] = ()
    """Implementations that use an operation without a DTensor sharding strategy."""
    traceable: ClassVar[tuple[Implementation, ...]] = ()
    """Implementations that can be traced into a whole-step graph because they never read the step count as a number."""
    counts_in_float32: ClassVar[bool] = False
    """Whether the optimizer's step count is a float32 tensor regardless of the parameters' dtype."""
    keeps_state_for_frozen: ClassVar[bool] = False
    """Whether the optimizer creates state at construction, also for parameters with `requires_grad=False`."""
    scales_partial_sums: ClassVar[tuple[Implementation, ...]] = ()
    """Implementations that apply a nonlinear function to a Partial DTensor gradient before DTensor sums it over ranks."""
    uses_signs: ClassVar[bool] = False
    """Whether the update uses each gradient element's sign. Rounding may change the sign of an element that is close to zero."""
    rounds_to: ClassVar[str] = ""
    """Dtype in which the optimizer computes updates, regardless of the parameters' dtype, named as in torch; empty for the
    parameters' dtype."""
    lr: float = 0.05
    """Learning rate, above 0."""
    weight_decay: float = 0.0
    """Weight decay, at least 0; applied as the torch optimizer does."""
    maximize: bool = False
    """Whether to maximize the loss."""
    implementation: Implementation = Implementation.FOR_LOOP
    """Implementation to use; `FUSED` only if torch has one on CPU."""

    def __post_init__(self) -> None:
        require_positive(self, "lr")
        require_not_negative(self, "weight_decay")
        if self.weight_decay and not self.decays:
            raise invalid_field(self, "weight_decay", "0.0", "this optimizer has no weight decay")
        if self.maximize and not self.has_maximize:
            raise invalid_field(self, "maximize", "False", "this optimizer cannot maximize")
        if self.implementation not in self.implementations():
            raise invalid_field(self, "implementation", ", ".join(map(repr, self.implementations())))

    @classmethod
    def implementations(cls) -> tuple[Implementation, ...]:
        """Implementations that torch has on CPU, simplest first."""
        there = {Implementation.FOREACH: cls.has_foreach, Implementation.FUSED: cls.has_fused}
        return tuple(implementation for implementation in Implementation if there.get(implementation, True))


@frozen_dataclass
class SGD(Optimizer):
    """Options for `torch.optim.SGD`."""

    has_fused: ClassVar[bool] = True
    without_dtensor: ClassVar[tuple[Implementation, ...]] = (Implementation.FUSED,)
    traceable: ClassVar[tuple[Implementation, ...]] = tuple(Implementation)
    momentum: float = 0.0
    """Momentum factor, 0 to 1."""
    dampening: float = 0.0
    """Dampening for momentum, 0 to 1."""
    nesterov: bool = False
    """Whether to use Nesterov momentum; needs momentum above 0 and dampening 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_between(self, "momentum", 0.0, 1.0)
        require_between(self, "dampening", 0.0, 1.0)
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise invalid_field(self, "nesterov", "False, or momentum above 0 and dampening 0")


@frozen_dataclass
class _Adaptive(Optimizer):
    """Common options in the Adam family."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates for the running averages of the gradient and its square, each in [0, 1)."""
    eps: float = 1e-8
    """Term added to the denominator, above 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_positive(self, "eps")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise invalid_field(self, "betas", "two numbers in [0, 1)")


@frozen_dataclass
class Adam(_Adaptive):
    """Options for `torch.optim.Adam`."""

    has_fused: ClassVar[bool] = True
    traceable: ClassVar[tuple[Implementation, ...]] = (Implementation.FUSED,)
    amsgrad: bool = False
    """Whether to use the maximum of all second moments so far."""


@frozen_dataclass
class AdamW(Adam):
    """Options for `torch.optim.AdamW` (decoupled weight decay)."""


@frozen_dataclass
class Adamax(_Adaptive):
    """Options for `torch.optim.Adamax`."""


@frozen_dataclass
class NAdam(_Adaptive):
    """Options for `torch.optim.NAdam`."""

    counts_in_float32: ClassVar[bool] = True
    momentum_decay: float = 4e-3
    """Momentum decay, at least 0."""
    decoupled_weight_decay: bool = False
    """Whether weight decay is decoupled, as in AdamW."""

    def __post_init__(self) -> None:
        _Adaptive.__post_init__(self)
        require_not_negative(self, "momentum_decay")


@frozen_dataclass
class RAdam(_Adaptive):
    """Options for `torch.optim.RAdam`."""

    decoupled_weight_decay: bool = False
    """Whether weight decay is decoupled, as in AdamW."""


@frozen_dataclass
class Adagrad(Optimizer):
    """Options for `torch.optim.Adagrad`."""

    has_fused: ClassVar[bool] = True
    without_dtensor: ClassVar[tuple[Implementation, ...]] = (Implementation.FUSED,)
    scales_partial_sums: ClassVar[tuple[Implementation, ...]] = (Implementation.FOREACH,)
    keeps_state_for_frozen: ClassVar[bool] = True
    lr_decay: float = 0.0
    """Rate at which the learning rate decreases over steps, as in `torch.optim.Adagrad`, at least 0."""
    initial_accumulator_value: float = 0.0
    """Initial value of the accumulated squares, at least 0."""
    eps: float = 1e-10
    """Term added to the denominator, above 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_not_negative(self, "lr_decay", "initial_accumulator_value")
        require_positive(self, "eps")


@frozen_dataclass
class Adadelta(Optimizer):
    """Options for `torch.optim.Adadelta`."""

    traceable: ClassVar[tuple[Implementation, ...]] = tuple(Implementation)
    rho: float = 0.9
    """Decay rate for the running averages, 0 to 1."""
    eps: float = 1e-6
    """Term added to the denominator, above 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_between(self, "rho", 0.0, 1.0)
        require_positive(self, "eps")


@frozen_dataclass
class RMSprop(Optimizer):
    """Options for `torch.optim.RMSprop`."""

    traceable: ClassVar[tuple[Implementation, ...]] = tuple(Implementation)
    alpha: float = 0.99
    """Smoothing constant for the squared gradient, 0 to 1. If centered, 0 and 1 are excluded: the variance would be zero or
    rounding."""
    eps: float = 1e-8
    """Term added to the denominator, above 0."""
    momentum: float = 0.0
    """Momentum factor, 0 to 1."""
    centered: bool = False
    """Whether gradients are normalized by an estimate of their variance."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_between(self, "alpha", 0.0, 1.0)
        require_between(self, "momentum", 0.0, 1.0)
        require_positive(self, "eps")
        if self.centered and self.alpha in (0.0, 1.0):
            raise invalid_field(self, "alpha", "a number in (0, 1) if centered is True")


@frozen_dataclass
class Rprop(Optimizer):
    """Options for `torch.optim.Rprop`, without weight decay."""

    decays: ClassVar[bool] = False
    uses_signs: ClassVar[bool] = True
    without_dtensor: ClassVar[tuple[Implementation, ...]] = tuple(Implementation)
    etas: tuple[float, float] = (0.5, 1.2)
    """Factors for decreasing a step size, in (0, 1), and for increasing it, above 1."""
    step_sizes: tuple[float, float] = (1e-6, 50.0)
    """Smallest and largest step size, above 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if not 0.0 < self.etas[0] < 1.0 < self.etas[1]:
            raise invalid_field(self, "etas", "a number in (0, 1) and a number above 1")
        if not 0.0 < self.step_sizes[0] <= self.step_sizes[1] < math.inf:
            raise invalid_field(self, "step_sizes", "two finite numbers above 0 in increasing order")


@frozen_dataclass
class ASGD(Optimizer):
    """Options for `torch.optim.ASGD`."""

    counts_in_float32: ClassVar[bool] = True
    lambd: float = 1e-4
    """ASGD's decay term, at least 0."""
    alpha: float = 0.75
    """Exponent in the formula that decreases the learning rate, at least 0."""
    t0: float = 1e6
    """Step at which averaging starts, at least 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_not_negative(self, "lambd", "alpha", "t0")


@frozen_dataclass
class Adafactor(Optimizer):
    """Options for `torch.optim.Adafactor`: factored second moments, learning rates relative to the parameter's RMS."""

    elementwise: ClassVar[bool] = False
    scales_partial_sums: ClassVar[tuple[Implementation, ...]] = (Implementation.FOR_LOOP, Implementation.FOREACH)
    beta2_decay: float = -0.8
    """Exponent for the second-moment decay over steps, at most 0."""
    eps: tuple[float | None, float] = (None, 1e-3)
    """Smallest second moment, at least 0 (None for the dtype's eps), and smallest parameter RMS, above 0."""
    d: float = 1.0
    """Clipping threshold for the update's RMS, at least 1."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if not -math.inf < self.beta2_decay <= 0.0:
            raise invalid_field(self, "beta2_decay", "a finite number of at most 0")
        if not (self.eps[0] is None or 0.0 <= self.eps[0] < math.inf) or not 0.0 < self.eps[1] < math.inf:
            raise invalid_field(self, "eps", "None or a finite number of at least 0, followed by a finite number above 0")
        if not 1.0 <= self.d < math.inf:
            raise invalid_field(self, "d", "a finite number of at least 1")


class AdjustLR(PrintableEnum):
    """How Muon adapts the learning rate to a matrix's shape."""

    ORIGINAL = "original"
    MATCH_RMS_ADAMW = "match_rms_adamw"


MAX_NS_STEPS = 20


@frozen_dataclass
class Muon(Optimizer):
    """Options for `torch.optim.Muon`: momentum, orthogonalized by Newton-Schulz iterations, for matrices only."""

    has_foreach: ClassVar[bool] = False
    has_maximize: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    updates_vectors: ClassVar[bool] = False
    rounds_to: ClassVar[str] = "bfloat16"
    lr: float = 0.02
    """Learning rate, above 0. Updates have about this size regardless of the gradient."""
    momentum: float = 0.95
    """Momentum factor, 0 to 1."""
    nesterov: bool = True
    """Whether to use Nesterov momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations, 1 to 20."""
    adjust_lr_fn: AdjustLR = AdjustLR.ORIGINAL
    """How the learning rate adapts to a matrix's shape."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_between(self, "momentum", 0.0, 1.0)
        require_between(self, "ns_steps", 1, MAX_NS_STEPS)


OPTIMIZERS: tuple[type[Optimizer], ...] = (
    SGD,
    Adam,
    AdamW,
    Adamax,
    NAdam,
    RAdam,
    Adagrad,
    Adadelta,
    RMSprop,
    Rprop,
    ASGD,
    Adafactor,
    Muon,
)
"""All optimizers, simplest first."""
