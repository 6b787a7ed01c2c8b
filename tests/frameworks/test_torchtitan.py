"""torchtitan's trainer on two ranks or four, by the version that is installed."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch

with contextlib.suppress(ModuleNotFoundError):
    from ecosystem import torchvision_operators  # noqa: F401 - before torchtitan

from equivcheck import Outcome, UsageError, check_training
from equivcheck.user.trainers.torchtitan import TorchTitan
from equivcheck.user.verdict import UserVerdict
from frameworks.pages import shown_output
from tools.trainers.frameworks.torchtitan import LAYOUTS, batches, tiny_llama, token_loss

titan = pytest.importorskip("torchtitan.trainer", reason="torchtitan imports triton")


def checked(
    mesh: dict[str, int], num_microbatches: int = 1, trainer: Any = None, *, world: Any = "gloo", **config: Any
) -> UserVerdict:
    """Two updates."""
    adapter = TorchTitan(config=partial(tiny_llama, **config), trainer=trainer)
    return check_training(
        model=adapter.model,
        trainer=adapter,
        mesh=mesh,
        batches=batches(num_microbatches),
        loss=token_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        dtype=torch.float32,
        world=world,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_equivalent(layout: str) -> None:
    """With accumulation and clipping. All labels of an update count equally."""
    verdict = checked(LAYOUTS[layout], 3, limit=0.1)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()
    assert not verdict.unread


class OwnLabels(titan.Trainer):  # type: ignore[misc, name-defined]
    """A mistake: each rank divides by the number of labels in its own microbatch."""

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        """Ignore the number of labels over all ranks and microbatches."""
        own = (labels != -100).sum() + 0 * global_valid_tokens
        return super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=own)


def test_a_trainer_that_divides_by_its_own_labels() -> None:
    """Its loss is a sum over ranks and microbatches."""
    verdict = checked({"dp": 2}, 3, trainer=OwnLabels)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.divergence is not None
    assert verdict.divergence.phase.value == shown_output("trainer_torchtitan"), verdict.describe()


class TwiceClipped(titan.Trainer):  # type: ignore[misc, name-defined]
    """A mistake: the update counts twice."""

    def train_step(self, batches: Any) -> None:
        """Step again with the same gradients."""
        super().train_step(batches)
        self.optimizers.optimizers[0].step()


def test_two_steps_with_the_same_gradients_are_refused() -> None:
    """Each update has one step."""
    with pytest.raises(UsageError, match=r"record\.before_update twice"):
        checked({"dp": 2}, trainer=TwiceClipped)


@pytest.mark.parametrize(
    ("mesh", "given", "words"),
    [
        ({"dp": 2}, {"world": "sim"}, "it needs processes"),
        ({"dp": 2}, {"backend": "spmd_types"}, "its spmd_backend 'spmd_types' needs a newer torch than 2.13"),
        ({"pp": 2}, {}, "its pipeline needs a newer torch than 2.13"),
        ({"dp": 2, "cp": 2}, {}, "torchtitan has no axes dp, cp in this order"),
    ],
)
def test_bad_input_is_one_line(mesh: dict[str, int], given: dict[str, Any], words: str) -> None:
    """It names the argument and the expected value."""
    with pytest.raises(UsageError) as raised:
        checked(mesh, **given)
    assert words in str(raised.value)
    assert "Expected " in str(raised.value)
