"""What is trained; no word of ranks."""

from __future__ import annotations

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.clipping import Clipping
from equivcheck.scenario.data import Data
from equivcheck.scenario.loss import CrossEntropy, Loss
from equivcheck.scenario.model import Model
from equivcheck.scenario.noun import noun, refuse, require_between, require_not_negative, require_positive
from equivcheck.scenario.optimizer import SGD, Optimizer
from equivcheck.scenario.schedule import Schedule
from equivcheck.system.choice import Choice

MAX_STEPS = 10


class Precision(Choice):
    """The element type of parameters, inputs and arithmetic."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"


class ZeroGrad(Choice):
    """What gradients are set to before a step."""

    NONE = "none"
    ZERO = "zero"


class Select(Choice):
    """Which parameters a group takes."""

    VECTORS = "vectors"
    FIRST_LAYER = "first_layer"
    ODD_LAYERS = "odd_layers"


@noun
class Group:
    """A parameter group with settings of its own; a parameter goes to the first that selects it, else to the optimizer's own."""

    select: Select = Select.VECTORS
    """Which parameters: all with one dim (biases, norms), those of layer 0, or those of layers 1, 3 ..."""
    lr_factor: float = 1.0
    """Its learning rate as a multiple of the optimizer's, above 0."""
    weight_decay: float = 0.0
    """Its weight decay, at least 0; 0 with an optimizer that has none."""

    def __post_init__(self) -> None:
        require_positive(self, "lr_factor")
        require_not_negative(self, "weight_decay")


@noun
class Training:
    """A whole training run on one device."""

    model: Model
    """What is trained."""
    data: Data
    """What one step consumes."""
    optimizer: Optimizer = SGD()
    """What updates the parameters."""
    loss: Loss | CrossEntropy = Loss.MSE_MEAN
    """What is minimised."""
    groups: tuple[Group, ...] = ()
    """Parameter groups beside the optimizer's own."""
    schedule: Schedule | None = None
    """Learning-rate schedule; None for a constant rate."""
    clipping: Clipping | None = None
    """Gradient clipping; None for none."""
    zero_grad: ZeroGrad = ZeroGrad.NONE
    """What gradients are set to before a step."""
    precision: Precision = Precision.FLOAT64
    """Element type."""
    steps: int = 1
    """Optimizer steps, 1 to 10."""
    seed: int = 0
    """Draws initial parameters and data, 0 to 2**32 - 1."""

    def __post_init__(self) -> None:
        require_between(self, "steps", 1, MAX_STEPS)
        require_between(self, "seed", 0, 2**32 - 1)
        if not self.optimizer.takes_vectors and not self.model.has_matrices_only:
            allowed = f"a model without biases, norms and scale with {type(self.optimizer).__name__}, which takes matrices only"
            raise InvalidScenario(f"Training.model has parameters of fewer than two dims; allowed: {allowed}")
        if isinstance(self.loss, CrossEntropy):
            self._check_labels()
        for group in self.groups:
            if group.weight_decay and not self.optimizer.decays:
                raise refuse(group, "weight_decay", "0.0 with Rprop, which has none")

    def _check_labels(self) -> None:
        if self.model.outputs < 2:
            raise refuse(self, "loss", "CrossEntropy only with a model of two outputs and more")
        if self.data.batch_dim and self.model.length is None:
            raise refuse(self.data, "batch_dim", "0 with CrossEntropy, where rows are no sequences")
