"""The place of the first difference is right, even if ranks split tensors without placements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import mse_loss

from equivcheck import check_training
from unit.user.diagnosis.test_where import without_causes  # noqa: F401 - a fixture
from unit.user.diagnosis.wrong_shards import _Sum, _Whole
from unit.user.programs import in_ddp, sgd_of

ALL_AGREE = "all module outputs and output gradients agree at step 0; the first difference is in the parameter gradients"


def numbers(*shapes: tuple[int, ...]) -> list[tuple[torch.Tensor, ...]]:
    """Two batches."""
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(2)]


class Perceptron(nn.Module):
    """Two layers that plain tensor parallelism splits, after another layer."""

    sums_output = sums_input = False
    factor, bend = 1.0, staticmethod(torch.tanh)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = (
            nn.Linear(size, out, bias=False) for size, out in ((4, 4), (4, 6), (6, 4), (4, 3))
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = torch.tanh(self.up(_Whole.apply(hidden) if self.sums_input else hidden))
        hidden = self.down(hidden * self.factor)
        return self.last(self.bend(_Sum.apply(hidden) if self.sums_output else hidden))


def split(*, sums_output: bool = True, sums_input: bool = True, factor: float = 1.0) -> Any:
    """Split `up` by columns and `down` by rows."""

    def parallelize(model: Perceptron, _mesh: DeviceMesh) -> None:
        model.sums_output, model.sums_input, model.factor = sums_output, sums_input, factor
        for layer, dim in ((model.up, 0), (model.down, 1)):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(2, dim)[dist.get_rank()].clone())

    return parallelize


def clipping(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
    """A step that clips on one device only."""
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    if not dist.is_initialized():
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    return value.detach()


def where(**changes: Any) -> str:
    """The verdict's place for a training split over two ranks."""
    usual = {
        "model": Perceptron,
        "parallelize": split(),
        "mesh": {"tp": 2},
        "cuts": {"up.weight": ((0, "tp"),), "down.weight": ((1, "tp"),)},
        "batches": numbers((4, 4), (4, 3)),
        "loss": mse_loss,
        "optimizer": sgd_of,
    }
    verdict = check_training(**usual | changes)
    assert verdict.divergence is not None
    return verdict.where


def halving(model: nn.Module, mesh: DeviceMesh) -> None:
    """Halve the gradient of the first layer's weight."""
    split()(model, mesh)
    model.first.weight.register_hook(lambda gradient: gradient / 2)


@pytest.mark.usefixtures("without_causes")
def test_partial_outputs_of_a_row_wise_layer_are_added_before_they_are_compared() -> None:
    """A row-wise layer is not named for its partial outputs if the fault is in a gradient."""
    assert where(parallelize=halving) == ALL_AGREE


@pytest.mark.usefixtures("without_causes")
def test_a_missing_sum_is_placed_between_the_partial_output_and_the_next_layer() -> None:
    """The next layer differs, and the verdict says that outputs before it are partial sums."""
    assert where(parallelize=split(sums_output=False)) == (
        "first module whose input differs: last (forward, ranks 0 and 1), at step 0; "
        "the fault is after the output of down, which is right as a sum over ranks"
    )


class Linear(Perceptron):
    """A perceptron whose last two layers are linear together."""

    bend = staticmethod(torch.clone)


@pytest.mark.usefixtures("without_causes")
def test_a_missing_sum_is_placed_at_the_partial_output_if_all_later_outputs_are_partial() -> None:
    """Linear layers turn partial sums into partial sums, so that none of their outputs differs as a sum."""
    says = "first module whose output is right only as a sum over the 2 tp ranks: down (forward), at step 0"
    assert where(model=Linear, parallelize=split(sums_output=False)) == says


@pytest.mark.usefixtures("without_causes")
def test_a_missing_sum_in_backward_is_placed_at_the_layer_whose_input_gradient_is_partial() -> None:
    """A column-wise layer whose input gradient nobody adds is named."""
    assert where(parallelize=split(sums_input=False)) == (
        "first module whose input gradient is right only as a sum over the 2 tp ranks: up (backward), at step 0"
    )


@pytest.mark.usefixtures("without_causes")
def test_code_between_two_modules_is_placed_at_the_input_of_the_second() -> None:
    """A wrong factor between two layers makes the second layer's input differ, although it has a part of the features."""
    assert where(parallelize=split(factor=2.0)) == "first module whose input differs: down (forward, ranks 0 and 1), at step 0"


def test_clipping_is_the_place_if_gradients_agree_before_it() -> None:
    """Ranks that do not clip differ only after clipping."""
    assert where(step=clipping) == "gradient clipping, at step 0: all gradients agree before it"


class OwnLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse_loss(self.linear(inputs), targets)


@pytest.mark.usefixtures("without_causes")
def test_a_loss_over_own_rows_that_the_model_returns_is_not_compared_as_an_output() -> None:
    """A model whose ranks return the loss over their own rows is not named."""

    def unreduced(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.linear.bias.register_hook(lambda gradient: gradient * 3)
        return in_ddp(model, mesh)

    given = {"model": OwnLoss, "parallelize": unreduced, "mesh": {"dp": 2}, "cuts": None, "loss": lambda value, _targets: value}
    assert where(batches=[(pair, pair[1]) for pair in numbers((4, 4), (4, 3))], **given) == ALL_AGREE


class Positions(nn.Module):
    """Layers over positions. Each rank computes its own positions, in chunks or from both ends, and gathers the outputs."""

    both_ends: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts, taken = inputs.chunk(4, 1), range(4)
        if self.both_ends is not None:
            rank = dist.get_rank()
            taken = (rank, 3 - rank) if self.both_ends else (2 * rank, 2 * rank + 1)
        outputs = self.last(torch.tanh(self.middle(torch.tanh(self.first(torch.cat([parts[part] for part in taken], 1))))))
        return outputs if self.both_ends is None else torch.cat([outputs, outputs.detach().flip(1)], 1)


@pytest.mark.parametrize("both_ends", [False, True])
@pytest.mark.usefixtures("without_causes")
def test_outputs_for_own_positions_have_a_place(both_ends: bool) -> None:
    """Outputs are compared with the same positions on one device. Both usual ways to share positions are known."""

    def parallelize(model: Positions, _mesh: DeviceMesh) -> None:
        model.both_ends = both_ends
        model.middle.register_forward_hook(lambda _module, _inputs, output: output * 1.5)

    given = {"model": Positions, "parallelize": parallelize, "mesh": {"cp": 2}, "cuts": None}
    says = "first module whose output differs: middle (forward, ranks 0 and 1), at step 0"
    assert where(batches=numbers((2, 8, 4), (2, 8, 3)), **given) == says


class Shuffled(nn.Module):
    """A layer that works on rows in another order on ranks, and a layer after it that does not."""

    on_ranks = False

    def __init__(self) -> None:
        super().__init__()
        self.shuffled, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.shuffled(inputs.flip(0) if self.on_ranks else inputs)
        return self.last(outputs.flip(0) if self.on_ranks else outputs)


@pytest.mark.usefixtures("without_causes")
def test_a_module_is_not_named_if_a_later_module_computes_right_values_from_it() -> None:
    """Rows in another order are no fault if they are put back before the next layer."""

    def parallelize(model: Shuffled, mesh: DeviceMesh) -> nn.Module:
        model.on_ranks = True
        model.last.register_forward_hook(lambda _module, _inputs, output: output * 2)
        return in_ddp(model, mesh)

    says = "first module whose output differs: last (forward, ranks 0 and 1), at step 0"
    assert where(model=Shuffled, parallelize=parallelize, mesh={"dp": 2}, cuts=None) == says
