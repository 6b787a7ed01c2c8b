"""The optimizers of `torch.optim`, a noun each, fields named as torch names them.

Left out: LBFGS, whose `step` calls the model as often as its line search asks for, and SparseAdam, as no model here has sparse
gradients.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from equivcheck.scenario.noun import noun, refuse, require_between, require_not_negative, require_positive
from equivcheck.system.choice import Choice


class Implementation(Choice):
    """Which of torch's implementations of the same update runs."""

    FOR_LOOP = "for_loop"
    FOREACH = "foreach"
    FUSED = "fused"


@noun
class Optimizer:
    """What every optimizer has; the class name is that of `torch.optim`."""

    fusable: ClassVar[bool] = False
    """Whether torch has a fused implementation on CPU."""
    foreachable: ClassVar[bool] = True
    """Whether torch has a foreach implementation."""
    maximizable: ClassVar[bool] = True
    """Whether it can ascend."""
    elementwise: ClassVar[bool] = True
    """Whether the update of an element depends on nothing but that element's gradients and values."""
    takes_vectors: ClassVar[bool] = True
    """Whether it updates parameters of one dim; else it refuses them."""
    decays: ClassVar[bool] = True
    """Whether it has weight decay."""
    without_dtensor: ClassVar[tuple[Implementation, ...]] = ()
    """Implementations with an operation that DTensor has no sharding strategy for."""
    traceable: ClassVar[tuple[Implementation, ...]] = ()
    """Implementations that a graph of a whole step can hold: they read no step count as a number."""
    counts_in_float32: ClassVar[bool] = False
    """Whether it counts steps in state of type float32, whatever the type of the parameters."""
    keeps_state_of_frozen: ClassVar[bool] = False
    """Whether it makes state when it is built, for frozen parameters as well."""
    scales_addends: ClassVar[tuple[Implementation, ...]] = ()
    """Implementations that scale a gradient element by what depends on it where DTensor has yet to sum it over ranks."""
    takes_signs: ClassVar[bool] = False
    """Whether an update goes by the sign of each element of a gradient, which rounding may turn where that is next to nothing."""
    rounds_to: ClassVar[str] = ""
    """Element type, named as torch does, that an update is computed in whatever that of the parameters; empty for theirs."""
    lr: float = 0.05
    """Learning rate, above 0."""
    weight_decay: float = 0.0
    """Weight decay, at least 0; each optimizer couples it as torch does."""
    maximize: bool = False
    """Whether it ascends."""
    implementation: Implementation = Implementation.FOR_LOOP
    """Which implementation runs; `FUSED` only where torch has one on CPU."""

    def __post_init__(self) -> None:
        require_positive(self, "lr")
        require_not_negative(self, "weight_decay")
        if self.weight_decay and not self.decays:
            raise refuse(self, "weight_decay", "0.0")
        if self.maximize and not self.maximizable:
            raise refuse(self, "maximize", "False")
        if self.implementation not in self.implementations():
            raise refuse(self, "implementation", ", ".join(map(repr, self.implementations())))

    @classmethod
    def implementations(cls) -> tuple[Implementation, ...]:
        """What torch has on CPU, simplest first."""
        there = {Implementation.FOREACH: cls.foreachable, Implementation.FUSED: cls.fusable}
        return tuple(implementation for implementation in Implementation if there.get(implementation, True))

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Print as code: Hypothesis would write class variables as if they were arguments."""
        printer.text(repr(self))


@noun
class SGD(Optimizer):
    """`torch.optim.SGD`."""

    fusable: ClassVar[bool] = True
    without_dtensor: ClassVar[tuple[Implementation, ...]] = (Implementation.FUSED,)
    traceable: ClassVar[tuple[Implementation, ...]] = tuple(Implementation)
    momentum: float = 0.0
    """Momentum factor, 0 to 1."""
    dampening: float = 0.0
    """Dampening of the momentum, 0 to 1."""
    nesterov: bool = False
    """Nesterov momentum; needs momentum above 0 and no dampening."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_between(self, "momentum", 0.0, 1.0)
        require_between(self, "dampening", 0.0, 1.0)
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise refuse(self, "nesterov", "only with momentum above 0 and dampening 0")


@noun
class _Adaptive(Optimizer):
    """What the Adam family shares."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running averages of the gradient and of its square, each in [0, 1)."""
    eps: float = 1e-8
    """Added to the denominator, above 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_positive(self, "eps")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise refuse(self, "betas", "two numbers in [0, 1)")


@noun
class Adam(_Adaptive):
    """`torch.optim.Adam`."""

    fusable: ClassVar[bool] = True
    traceable: ClassVar[tuple[Implementation, ...]] = (Implementation.FUSED,)
    amsgrad: bool = False
    """Whether the largest second moment so far is used."""


@noun
class AdamW(Adam):
    """`torch.optim.AdamW`: decoupled weight decay."""


@noun
class Adamax(_Adaptive):
    """`torch.optim.Adamax`."""


@noun
class NAdam(_Adaptive):
    """`torch.optim.NAdam`."""

    counts_in_float32: ClassVar[bool] = True
    momentum_decay: float = 4e-3
    """Decay of the momentum, at least 0."""
    decoupled_weight_decay: bool = False
    """Whether weight decay is applied as AdamW does."""

    def __post_init__(self) -> None:
        _Adaptive.__post_init__(self)
        require_not_negative(self, "momentum_decay")


@noun
class RAdam(_Adaptive):
    """`torch.optim.RAdam`."""

    decoupled_weight_decay: bool = False
    """Whether weight decay is applied as AdamW does."""


@noun
class Adagrad(Optimizer):
    """`torch.optim.Adagrad`."""

    fusable: ClassVar[bool] = True
    without_dtensor: ClassVar[tuple[Implementation, ...]] = (Implementation.FUSED,)
    scales_addends: ClassVar[tuple[Implementation, ...]] = (Implementation.FOREACH,)
    keeps_state_of_frozen: ClassVar[bool] = True
    lr_decay: float = 0.0
    """Decay of the learning rate, at least 0."""
    initial_accumulator_value: float = 0.0
    """Where the sum of squares starts, at least 0."""
    eps: float = 1e-10
    """Added to the denominator, above 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_not_negative(self, "lr_decay", "initial_accumulator_value")
        require_positive(self, "eps")


@noun
class Adadelta(Optimizer):
    """`torch.optim.Adadelta`."""

    traceable: ClassVar[tuple[Implementation, ...]] = tuple(Implementation)
    rho: float = 0.9
    """Decay of the running averages, 0 to 1."""
    eps: float = 1e-6
    """Added to the denominator, above 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_between(self, "rho", 0.0, 1.0)
        require_positive(self, "eps")


@noun
class RMSprop(Optimizer):
    """`torch.optim.RMSprop`."""

    traceable: ClassVar[tuple[Implementation, ...]] = tuple(Implementation)
    alpha: float = 0.99
    """Smoothing of the squared gradient, 0 to 1; strictly between where centered, or the variance would be rounding or 0."""
    eps: float = 1e-8
    """Added to the denominator, above 0."""
    momentum: float = 0.0
    """Momentum factor, 0 to 1."""
    centered: bool = False
    """Whether the gradient is normalised by an estimate of its variance."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_between(self, "alpha", 0.0, 1.0)
        require_between(self, "momentum", 0.0, 1.0)
        require_positive(self, "eps")
        if self.centered and self.alpha in (0.0, 1.0):
            raise refuse(self, "alpha", "a number in (0, 1) where centered")


@noun
class Rprop(Optimizer):
    """`torch.optim.Rprop`; it has no weight decay."""

    decays: ClassVar[bool] = False
    takes_signs: ClassVar[bool] = True
    without_dtensor: ClassVar[tuple[Implementation, ...]] = tuple(Implementation)
    etas: tuple[float, float] = (0.5, 1.2)
    """Factors by which a step shrinks, in (0, 1), and grows, above 1."""
    step_sizes: tuple[float, float] = (1e-6, 50.0)
    """Smallest and largest step, above 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if not 0.0 < self.etas[0] < 1.0 < self.etas[1]:
            raise refuse(self, "etas", "a number in (0, 1) and one above 1")
        if not 0.0 < self.step_sizes[0] <= self.step_sizes[1] < math.inf:
            raise refuse(self, "step_sizes", "two finite numbers above 0 in rising order")


@noun
class ASGD(Optimizer):
    """`torch.optim.ASGD`."""

    counts_in_float32: ClassVar[bool] = True
    lambd: float = 1e-4
    """Decay term, at least 0."""
    alpha: float = 0.75
    """Power of the learning rate's decay, at least 0."""
    t0: float = 1e6
    """Step at which averaging starts, at least 0."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        require_not_negative(self, "lambd", "alpha", "t0")


@noun
class Adafactor(Optimizer):
    """`torch.optim.Adafactor`: second moments by rows and columns, rates relative to the norm of a parameter."""

    elementwise: ClassVar[bool] = False
    scales_addends: ClassVar[tuple[Implementation, ...]] = (Implementation.FOR_LOOP, Implementation.FOREACH)
    beta2_decay: float = -0.8
    """Exponent of the decay of second moments over steps, at most 0."""
    eps: tuple[float | None, float] = (None, 1e-3)
    """Smallest second moment (None for the element type's eps), at least 0, and smallest norm of a parameter, above 0."""
    d: float = 1.0
    """Largest root mean square of an update, at least 1."""

    def __post_init__(self) -> None:
        Optimizer.__post_init__(self)
        if not -math.inf < self.beta2_decay <= 0.0:
            raise refuse(self, "beta2_decay", "a finite number of at most 0")
        if not (self.eps[0] is None or 0.0 <= self.eps[0] < math.inf) or not 0.0 < self.eps[1] < math.inf:
            raise refuse(self, "eps", "None or a finite number of at least 0, and a finite number above 0")
        if not 1.0 <= self.d < math.inf:
            raise refuse(self, "d", "a finite number of at least 1")


class AdjustLR(Choice):
    """How Muon fits the learning rate to the shape of a matrix."""

    ORIGINAL = "original"
    MATCH_RMS_ADAMW = "match_rms_adamw"


MAX_NS_STEPS = 20


@noun
class Muon(Optimizer):
    """`torch.optim.Muon`: momentum made orthogonal by Newton-Schulz iterations; takes matrices only."""

    foreachable: ClassVar[bool] = False
    maximizable: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False
    takes_vectors: ClassVar[bool] = False
    rounds_to: ClassVar[str] = "bfloat16"
    lr: float = 0.02
    """Learning rate, above 0; an update is about as large as the rate, whatever the gradient."""
    momentum: float = 0.95
    """Momentum factor, 0 to 1."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: int = 5
    """Newton-Schulz iterations, 1 to 20."""
    adjust_lr_fn: AdjustLR = AdjustLR.ORIGINAL
    """How the learning rate depends on the shape of a matrix."""

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
"""Every optimizer noun, simplest first."""
