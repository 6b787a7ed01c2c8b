"""transformers' trainer on two ranks, by the version that is installed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

with contextlib.suppress(ModuleNotFoundError):
    from ecosystem import torchvision_operators  # noqa: F401 - before transformers

from equivcheck import Outcome, UsageError, check_training
from equivcheck.user.trainers.transformers import HFTrainer
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Phase
from frameworks.pages import shown_output
from tools.trainers.frameworks.transformers import packed_batches

transformers = pytest.importorskip("transformers")


def model() -> nn.Module:
    """Two tiny layers of Llama."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False))


def batches(num_microbatches: int, *, is_uneven: bool) -> list[Any]:
    """Two updates. If uneven, rows have different numbers of labels that count."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(2 * num_microbatches):
        tokens = torch.randint(0, 32, (4, 8), generator=generator)
        labels = tokens.clone()
        for row in range(4) if is_uneven else ():
            labels[row, : (3 * row + 2 * number) % 7] = -100
        made.append(({"input_ids": tokens, "labels": labels}, None))
    return [made[:num_microbatches], made[num_microbatches:]]


def checked(
    num_microbatches: int, limit: float, *, is_uneven: bool, averages: bool = True, trainer: Any = None, **arguments: Any
) -> UserVerdict:
    """Two updates on two ranks."""
    given: dict[str, Any] = {
        "model": model,
        "mesh": {"dp": 2},
        "batches": batches(num_microbatches, is_uneven=is_uneven),
        "loss": lambda outputs, _: outputs.loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "dtype": torch.float32,
        "world": "gloo",
    }
    given |= {name: arguments.pop(name) for name in given.keys() & arguments.keys()}
    arguments = {"max_grad_norm": limit, "average_tokens_across_devices": averages} | arguments
    return check_training(trainer=HFTrainer(arguments=arguments, trainer=trainer), **given)


@pytest.mark.parametrize("is_uneven", [False, True])
@pytest.mark.parametrize(("num_microbatches", "limit"), [(1, 0.0), (3, 0.0), (3, 0.1)])
def test_ddp_is_equivalent(num_microbatches: int, limit: float, is_uneven: bool) -> None:
    """All labels of an update count equally, on any rank and in any microbatch."""
    verdict = checked(num_microbatches, limit, is_uneven=is_uneven)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict
    assert not verdict.unread


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_without_the_average_over_ranks_labels_count_by_rank(num_microbatches: int) -> None:
    """Ranks with fewer labels then weigh them more. It does not matter if all ranks have equally many."""
    verdict = checked(num_microbatches, 0.0, is_uneven=True, averages=False)
    assert verdict.outcome is Outcome.DIVERGED
    assert verdict.divergence is not None
    assert verdict.divergence.phase is Phase.LOSS
    assert checked(num_microbatches, 0.0, is_uneven=False, averages=False).outcome is Outcome.EQUIVALENT


class MeanOfMicrobatch(transformers.Trainer):  # type: ignore[misc, name-defined]
    """A mistake: the trainer does not divide by the number of microbatches if it passes the number of labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Average over this microbatch's labels only."""
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_a_subclass_that_ignores_the_number_of_labels() -> None:
    """Its gradient is a sum."""
    verdict = checked(3, 0.0, is_uneven=False, trainer=MeanOfMicrobatch)
    assert verdict.outcome is Outcome.DIVERGED, verdict
    assert verdict.cause == shown_output("trainer_transformers"), verdict


FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


@pytest.mark.parametrize(("num_microbatches", "limit"), [(1, 0.0), (3, 0.0), (3, 0.1)])
def test_fsdp2_is_equivalent(num_microbatches: int, limit: float) -> None:
    """Parameters are DTensors."""
    verdict = checked(num_microbatches, limit, is_uneven=True, **FSDP2)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def frozen_model() -> nn.Module:
    """The same, but embeddings are not trained."""
    built = model()
    built.get_input_embeddings().requires_grad_(requires_grad=False)  # type: ignore[operator]
    return built


def test_tensor_parallelism_is_equivalent() -> None:
    """Frozen parameters stay frozen, although each rank loads its part of the model."""
    verdict = checked(3, 0.1, is_uneven=True, mesh={"tp": 2}, model=frozen_model)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def test_packed_rows_are_equivalent() -> None:
    """Each row has two documents."""
    verdict = checked(3, 0.1, is_uneven=True, batches=packed_batches(3))
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


def adafactor(parameters: list[Any]) -> torch.optim.Optimizer:
    """Optimizer whose state has other shapes than its parameters."""
    return torch.optim.Adafactor(parameters, lr=0.01)


def test_state_of_other_shapes_is_equivalent() -> None:
    """Adafactor's rows and columns."""
    verdict = checked(1, 0.0, is_uneven=True, optimizer=adafactor)
    assert verdict.outcome is Outcome.EQUIVALENT, verdict.describe()


@pytest.mark.parametrize(("arguments", "words"), [({"bf16": True}, "its bf16 rounds at other points than the single-device run")])
def test_bad_input_is_one_line(arguments: dict[str, Any], words: str) -> None:
    """It names the argument and the expected value."""
    with pytest.raises(UsageError) as raised:
        checked(1, 0.0, is_uneven=True, **arguments)
    assert str(raised.value).startswith(f"check_training: trainer HFTrainer is not valid: {words}. Expected ")


def test_an_unknown_argument_is_one_line() -> None:
    """The error is that of transformers."""
    with pytest.raises(UsageError) as raised:
        checked(1, 0.0, is_uneven=True, no_such_argument=1)
    assert str(raised.value).startswith("check_training: trainer Trainer is not valid: TrainingArguments refuses its arguments (")
    assert "unexpected keyword argument 'no_such_argument'" in str(raised.value)
