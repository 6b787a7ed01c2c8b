"""Training: model, data, optimizer and loop options, without any distribution."""

from __future__ import annotations

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.clipping import Clipping
from equivcheck.scenario.data import Data
from equivcheck.scenario.loss import CrossEntropy, Loss
from equivcheck.scenario.model import Model
from equivcheck.scenario.noun import frozen_dataclass, invalid_field, require_between, require_not_negative, require_positive
from equivcheck.scenario.optimizer import SGD, Optimizer
from equivcheck.scenario.schedule import Schedule
from equivcheck.system.choice import PrintableEnum

MAX_STEPS = 10


class Precision(PrintableEnum):
    """Dtype for parameters, inputs and arithmetic."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"


class ZeroGrad(PrintableEnum):
    """Value for gradients after `zero_grad`: None, or zero tensors."""

    NONE = "none"
    ZERO = "zero"


class ParameterSelection(PrintableEnum):
    """Rule that selects the model's parameters for a parameter group."""

    VECTORS = "vectors"
    FIRST_LAYER = "first_layer"
    ODD_LAYERS = "odd_layers"


@frozen_dataclass
class ParameterGroup:
    """Parameter group with its own settings.

    A parameter belongs to the first group that selects it, else to the default group.
    """

    select: ParameterSelection = ParameterSelection.VECTORS
    """Parameters in the group: all with one dim (biases, norms), those in layer 0, or those in layers 1, 3, 5 and so on."""
    lr_factor: float = 1.0
    """Learning rate relative to the optimizer's, above 0."""
    weight_decay: float = 0.0
    """Weight decay, at least 0; must be 0 if the optimizer has none."""

    def __post_init__(self) -> None:
        require_positive(self, "lr_factor")
        require_not_negative(self, "weight_decay")


@frozen_dataclass
class Training:
    """A training as it runs on one device: model, data, loss, optimizer and number of steps."""

    model: Model
    """Model to train."""
    data: Data
    """Batch for each step."""
    optimizer: Optimizer = SGD()
    """Optimizer for all parameters."""
    loss: Loss | CrossEntropy = Loss.MSE_MEAN
    """Loss to minimize."""
    groups: tuple[ParameterGroup, ...] = ()
    """Additional parameter groups."""
    schedule: Schedule | None = None
    """Learning rate schedule; None for a constant rate."""
    clipping: Clipping | None = None
    """Gradient clipping; None disables it."""
    zero_grad: ZeroGrad = ZeroGrad.NONE
    """Value for gradients after `zero_grad`."""
    precision: Precision = Precision.FLOAT64
    """Dtype for parameters, inputs and arithmetic."""
    steps: int = 1
    """Optimizer steps, 1 to 10."""
    seed: int = 0
    """Seed for initial parameters and data, 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        require_between(self, "steps", 1, MAX_STEPS)
        require_between(self, "seed", 0, 2**32 - 1)
        if not self.optimizer.updates_vectors and not self.model.has_matrices_only:
            name = type(self.optimizer).__name__
            raise InvalidScenario(
                f"Training.model is not valid: {name} only updates parameters with two dims. "
                "Expected a model without bias, norm and scale."
            )
        if isinstance(self.loss, CrossEntropy):
            self._check_labels()
        for group in self.groups:
            if group.weight_decay and not self.optimizer.decays:
                raise invalid_field(group, "weight_decay", "0.0 if the optimizer is Rprop")

    @property
    def has_trailing_window(self) -> bool:
        """Whether the last step has fewer microbatches than the steps before it."""
        return self.data.has_trailing_window(self.steps)

    def microbatches_at(self, step: int) -> tuple[int, ...]:
        """Number of rows in each microbatch of the step with this index."""
        return self.data.microbatches_at(step, self.steps)

    def rows_at(self, step: int) -> int:
        """Number of rows in the step with this index, over all microbatches."""
        return sum(self.microbatches_at(step))

    def _check_labels(self) -> None:
        if self.model.out_features < 2:
            raise invalid_field(self, "loss", "a model with at least two outputs, or a loss other than CrossEntropy")
        if self.data.batch_dim and self.model.length is None:
            raise invalid_field(self.data, "batch_dim", "0 if the loss is a CrossEntropy and rows are not sequences")
