"""Exceptions in the single-device run get a note about their usual mistake."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from equivcheck import Outcome, check_training
from unit.user.programs import brought, build, loss, said


class Several(nn.Module):
    """A model with its output in a container."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        self.inner, self.container = build(), container

    def forward(self, inputs: torch.Tensor) -> Any:
        """Put the output into the container."""
        return self.container(self.inner(inputs))


class ToFloat32(nn.Module):
    """A model that casts its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Cast, then compute."""
        result: torch.Tensor = self.inner(inputs.float())
        return result


def step_in_float32(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """Cast the inputs in the step."""
    optimizer.zero_grad()
    value: torch.Tensor = loss(model(batch[0].float()), batch[1])
    value.backward()
    optimizer.step()
    return value


def step_without_graph(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, loss: Any) -> torch.Tensor:
    """Detach the loss."""
    value: torch.Tensor = loss(model(batch[0]), batch[1]).detach()
    value.backward()
    return value


@pytest.mark.parametrize(
    ("container", "kind", "way"),
    [
        (lambda output: (output, output.mean()), "tuple", "your_loss(outputs[0], targets)"),
        (lambda output: OrderedDict(scores=output), "OrderedDict", "your_loss(outputs['scores'], targets)"),
    ],
)
def test_several_outputs_need_a_loss_that_selects(container: Any, kind: str, way: str) -> None:
    """The note has code that selects an output."""
    with pytest.raises(AttributeError) as caught:
        check_training(**brought(model=lambda: Several(container)))
    note = caught.value.__notes__[0]
    assert f"your model returned a {kind}, and `loss` gets it unchanged" in note
    assert way in note


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"model": ToFloat32}, "Pass keep_dtype=True"),
        ({"step": step_in_float32}, "Pass keep_dtype=True"),
        ({"step": step_without_graph}, "without .detach(), .item()"),
        ({"loss": lambda outputs, targets: torch.zeros(3) + (outputs @ targets)}, None),
    ],
)
def test_known_messages_get_a_hint(changes: dict[str, Any], hint: str | None) -> None:
    """Other messages get none."""
    with pytest.raises(RuntimeError) as caught:
        check_training(**brought(**changes))
    (note,) = caught.value.__notes__
    assert note.endswith("(dtype=None leaves them unchanged)") if hint is None else hint in note


@pytest.mark.parametrize("changes", [{"model": ToFloat32}, {"step": step_in_float32}])
def test_hint_for_float32_helps(changes: dict[str, Any]) -> None:
    """Both suggested arguments make the training run."""
    check_training(**brought(**changes), keep_dtype=True).assert_equivalent()
    check_training(**brought(**changes), dtype=torch.float32).assert_equivalent()


def test_a_loss_that_only_ranks_detach_is_their_failure() -> None:
    """The verdict is CRASHED, because the arguments are valid on one device."""

    def detaching(model: nn.Module, _: Any) -> None:
        model.register_forward_hook(lambda module, inputs, output: output.detach())

    verdict = check_training(**brought(parallelize=detaching, loss=loss))
    assert verdict.outcome is Outcome.CRASHED
    assert "loss is not valid: its result does not depend on a parameter" in said(verdict)
