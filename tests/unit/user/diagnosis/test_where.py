"""The verdict names the first module whose output or output gradient differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivcheck import check_training
from equivcheck.user.lazy_diagnosis import UserDiagnosis
from unit.user.diagnosis.wrong_shards import SHARDS
from unit.user.diagnosis.wrong_weights import WEIGHTS
from unit.user.programs import brought, build, in_ddp, said
from unit.user.test_findings import reduced


@pytest.fixture
def without_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search for modules, but not for causes."""
    monkeypatch.setattr("equivcheck.user.diagnosis.explain.explanation_of", lambda _diverged: UserDiagnosis())


def doubling(which: int, path: str, *, gradient: bool = False) -> Any:
    """Data parallelism that doubles one module's output, or its gradient, on one rank."""

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if gradient:
            output.register_hook(lambda value: value * 3)
            return None
        return output * 2

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if mesh.get_rank() == which:
            model.get_submodule(path).register_forward_hook(hook)
        return in_ddp(model, mesh)

    return parallelize


class Nested(nn.Module):
    """A model with named blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build()[:3] if number == 0 else nn.Linear(6, 6) for number in range(3))
        self.head = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return self.head(inputs)


@pytest.mark.parametrize(
    ("which", "path", "gradient", "says"),
    [
        (1, "layers.1", False, "first module whose output differs: layers.1 (forward, rank 1), at step 0"),
        pytest.param(
            0, "head", False, "first module whose output differs: head (forward, rank 0), at step 0", marks=pytest.mark.slow
        ),
        (1, "layers.0.1", True, "first module whose output gradient differs: layers.0.1 (backward, rank 1), at step 0"),
    ],
)
@pytest.mark.usefixtures("without_causes")
def test_the_first_module_that_differs_is_named(which: int, path: str, gradient: bool, says: str) -> None:
    """The module has its original name under any wrapper. Forward comes before backward."""
    verdict = check_training(**brought(model=Nested, parallelize=doubling(which, path, gradient=gradient)))
    assert verdict.where == says
    assert says in said(verdict)


@pytest.mark.usefixtures("without_causes")
def test_where_no_module_differs_that_is_said() -> None:
    """A wrong reduction leaves all modules correct."""
    verdict = check_training(**brought(parallelize=lambda model, _: reduced(model, lambda average: average * 2)))
    assert verdict.where.startswith("all module outputs and output gradients agree at step 0")


@pytest.mark.usefixtures("without_causes")
def test_local_parts_are_laid_by_placement() -> None:
    """A column-wise layer is correct although its output is only a part."""
    plan = {"layers.1": ColwiseParallel(use_local_output=False), "layers.2": RowwiseParallel()}

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        parallelize_module(model, mesh, plan)
        if dist.get_rank() == 1:
            model.head.register_forward_hook(lambda _module, _inputs, output: output + 1)
        return model

    verdict = check_training(**brought(model=Nested, parallelize=parallelize, mesh={"tp": 2}))
    assert verdict.where == "first module whose output differs: head (forward, rank 1), at step 0"


@pytest.mark.usefixtures("without_causes")
def test_a_gradient_that_nobody_sums_is_named_at_the_layer_that_makes_it() -> None:
    """A column-wise layer without a reduction is named by its input gradient, not the layer before it."""
    verdict = check_training(**SHARDS["head_reduction_missing"].brought)
    says = "first module whose input gradient is right only as a sum over the 2 tp ranks: 3 (backward), at step 0"
    assert verdict.where == says


def test_updates_are_no_matter_of_modules() -> None:
    """No module is named if an update differs first."""
    verdict = check_training(**SHARDS["lars_on_a_shard"].brought)
    assert verdict.cause
    assert not verdict.where


@pytest.mark.slow
def test_what_is_compiled_has_no_modules_to_look_into() -> None:
    """The verdict explains why it names no module in a compiled model."""

    def compiled(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        doubling(1, "3")(model, mesh)
        return torch.compile(in_ddp(model, mesh), backend="aot_eager")

    verdict = check_training(**brought(parallelize=compiled))
    assert verdict.divergence is not None
    assert verdict.where == "no module is named, because your model is compiled and runs as one function"


def test_no_module_is_named_if_ranks_form_other_microbatches() -> None:
    """Each rank splits its own rows, so that the model's calls have other rows than on one device."""
    verdict = check_training(**WEIGHTS["labels_of_each_microbatch"].brought)
    assert verdict.cause
    assert verdict.where == ""


class OfTwo(nn.Module):
    """A model with two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Add what both layers compute."""
        return self.first(inputs) + self.second(others)


@pytest.mark.usefixtures("without_causes")
def test_two_inputs_of_one_call_are_not_two_calls() -> None:
    """If ranks exchange two inputs, the model's input differs, although all inputs together are the same values."""

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
        inputs, targets = batch
        pair = (inputs, inputs**2)
        optimizer.zero_grad()
        value = loss(model(*(reversed(pair) if dist.is_initialized() else pair)), targets)
        value.backward()
        optimizer.step()
        return value.detach()

    verdict = check_training(**brought(model=OfTwo, step=step))
    assert verdict.where == "first module whose input differs: the full model (forward, ranks 0 and 1), at step 0"
