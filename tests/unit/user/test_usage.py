"""Invalid arguments for `check_training` raise a one-line error."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from equivcheck import UsageError, check_training, explained
from equivcheck.scenario import ElementType, LowPrecision, MixedPrecision
from equivcheck.user.task import CALLS
from equivcheck.user.usage import require_call
from equivcheck.worlds.pool import ranks
from unit.user.programs import batches, brought, build, loss

_counter = itertools.count(1)
_one = build()
_lock = threading.Lock()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": (2, 2)}, r"mesh \(2, 2\) .* not a dict\. Expected a dict"),
        ({"mesh": {}}, "mesh {} .* empty .*Expected a dict"),
        ({"mesh": {"dp": 0}}, "mesh .* axis 'dp' has size 0"),
        ({"mesh": {"dp": True}}, "mesh .* axis 'dp' has size True"),
        ({"mesh": {"workers": 2}}, r"mesh axis 'workers' .* data_axes=\(\.\.\.\)"),
        ({"data_axes": ("tp",)}, r"data_axes \('tp',\) .* no axis 'tp'\. Expected .* dp\."),
        ({"data_axes": "dp"}, "data_axes 'dp' .* string.* Expected a tuple"),
        ({"batches": []}, "batches .* empty"),
        ({"batches": [[]]}, r"batch 0 .* no microbatch"),
        ({"batches": [torch.ones(4, 4)]}, r"batch 0 .* Tensor instead of a pair\. Expected a pair \(inputs, targets\)"),
        ({"batches": batches(3)}, "batch 0 .* 3 rows.* dp 2.* multiple of 2"),
        ({"model": nn.Linear(4, 2), "loss": 3}, "loss 3 .* Expected a function"),
        ({"step": 3}, "step 3 .* not callable. Expected .* step.model, batch, optimizer, loss., or None"),
        (
            {"step": lambda model, batch: 0.0},
            r"step <.* too many positional arguments. Expected a function step\(model, ",
        ),
        (
            {"step": lambda model, batch, loss, optimizer: 0.0},
            r"its parameter `loss` would get the optimizer\. Expected a function step\(model, batch, optimizer, loss\)",
        ),
        ({"also": lambda optimizer, model: {}}, r"its parameter `optimizer` would get the model\. Expected a function also"),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
            r"optimizer SGD \( .* Expected a function optimizer\(",
        ),
        ({"parallelize": lambda model: model}, r"parallelize .* Expected a function parallelize\(model, mesh\)"),
        ({"mesh": {"fdsp": 2}}, "mesh axis 'fdsp' .* Did you mean fsdp.* Expected data_axes="),
        ({"mesh": {"dp_shard": 2}, "data_axes": ("dp_shar",)}, r"no axis 'dp_shar'\. Did you mean dp_shard\? "),
        ({"world": "gluo"}, r"world 'gluo' .* Did you mean gloo\? Expected one of sim"),
        ({"batches": batches()[0]}, r"batch 0 .* Tensor instead of a pair\. .* batches=\[\(inputs, targets\)\]"),
        (
            {"batches": [{"x": torch.ones(4, 4)}]},
            r"batch 0 .* a dict instead of a pair\. .* \(batch, None\) and loss=lambda outputs, _: ",
        ),
        ({"batches": batches(0)}, "batch 0 .* no rows. Expected a multiple of 2"),
        ({"batches": batches(1)}, "batch 0 .* 1 row, which does not split evenly over dp 2"),
        ({"loss": lambda outputs, targets: (outputs - targets).square()}, r"loss .* shape \[4, 2\]\. Expected .* \.mean\(\)"),
        (
            {"loss": lambda outputs, targets: loss(outputs, targets).item()},
            r"loss .* of type float\. Expected .* without \.item\(\)",
        ),
        (
            {"loss": lambda outputs, targets: loss(outputs.detach(), targets)},
            "loss .* does not depend on a parameter .*detach",
        ),
        ({"reduction": "max"}, "reduction 'max' .* Expected mean or sum"),
        ({"dtype": torch.int64}, "dtype torch.int64 .* floating-point"),
        ({"precision": "bf16"}, r"precision 'bf16' .* Expected LowPrecision.BFLOAT16, .* \(autocast\), MixedPrecision\(param="),
        ({"precision": torch.bfloat16}, "precision torch.bfloat16 .* Expected LowPrecision.BFLOAT16"),
        (
            {"precision": MixedPrecision(param=torch.bfloat16)},  # type: ignore[arg-type]
            "precision.param torch.bfloat16 .* Expected ElementType.FLOAT64, .*, or None",
        ),
        (
            {"precision": LowPrecision.BFLOAT16},
            "precision LowPrecision.BFLOAT16 with dtype torch.float64 .* autocast .* dtype=torch.float32",
        ),
        ({"dropout_masks": 3}, "dropout_masks 3 .* Expected True or False"),
        (
            {"model": lambda: nn.Sequential(build(), nn.Dropout(0.1), nn.AlphaDropout(0.2)), "dropout_masks": True},
            r"\(by AlphaDropout '2', p=0.2\)\. Expected",
        ),
        ({"keep_dtype": "yes"}, "keep_dtype 'yes' .* Expected True or False"),
        ({"keep_dtype": True, "dtype": None}, "keep_dtype True with dtype None .* Expected dtype=torch.float64"),
        (
            {"keep_dtype": True, "dtype": torch.float32, "precision": MixedPrecision(param=ElementType.BFLOAT16)},
            r"keep_dtype True with precision MixedPrecision\(param=.* Expected .*precision=None",
        ),
        ({"model": nn.Sequential(build(), nn.Dropout(0.1))}, r"\(by Dropout '1', p=0.1\)"),
        ({"model": lambda: None}, "model .* returned None. Expected a torch.nn.Module"),
        ({"model": lambda: _one}, "model .* same module"),
        (
            {"model": lambda: nn.Linear(4, 2).requires_grad_() if next(_counter) % 2 else build()},
            "model .* differs between",
        ),
        (
            {"model": lambda: nn.Sequential(build(), nn.Dropout())},
            r"at step 0 \(loss\).* \(by Dropout '1', p=0.5\)\. Expected",
        ),
        ({"loss": lambda outputs, targets: (outputs * torch.rand(())).mean()}, "draws random numbers. Expected .* masks"),
        ({"model": lambda: nn.Linear(4, 2, dtype=torch.complex128), "dtype": None}, "weight is complex. Expected real"),
        (
            {"optimizer": lambda parameters, names: torch.optim.SGD(parameters)},
            "optimizer .* requires 2 arguments. Expected .* named_parameters for pairs of name and parameter",
        ),
        ({"optimizer": lambda parameters: None}, "optimizer .* returned None. Expected a torch.optim.Optimizer"),
        ({"step": lambda *arguments: "done"}, "step .* returned 'done'. Expected the loss"),
        ({"parallelize": lambda model, mesh: mesh}, "parallelize .* returned DeviceMesh.* Expected a torch.nn.Module, or None"),
        ({"full_tensors": lambda module: 3}, "full_tensors .* returned a value of type int. Expected a dict"),
        ({"world": "fake"}, "world 'fake' .* no data to compare. Expected one of sim, gloo"),
        ({"world": "mpi"}, "world 'mpi' is not valid: it does not exist. Expected one of sim, gloo, fake"),
        ({"world": "gloo", "loss": lambda outputs, targets: _lock}, "loss <function <lambda>.*cannot be copied to"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_one_line_says_what_and_what_is_allowed(changes: dict[str, Any], words: str) -> None:
    """The text has argument, value and valid values."""
    with pytest.raises(UsageError, match=words) as caught:
        check_training(**brought(**changes))
    assert "\n" not in str(caught.value)


def test_ranks_must_be_those_of_the_mesh() -> None:
    """Given ranks must match the mesh size."""
    with pytest.raises(UsageError, match=r"world .* 3 ranks\. Expected 2 ranks"):
        check_training(**brought(world=ranks("sim", 3)))


def test_what_one_device_raises_stays_as_it_is() -> None:
    """The user's exception is raised with a note."""
    with pytest.raises(ZeroDivisionError) as caught:
        check_training(**brought(loss=lambda outputs, targets: 1 / 0))
    assert "single-device run, with model and batches converted to torch.float64" in caught.value.__notes__[0]


def test_targets_may_have_the_name_outputs() -> None:
    """Many data sets call their targets outputs."""
    require_call("loss", lambda logits, outputs: (logits - outputs).square().mean(), CALLS["loss"], is_optional=False)


def test_explained_takes_verdicts_of_scenarios() -> None:
    """`explained` rejects a `UserVerdict`."""
    verdict = check_training(**brought(parallelize=lambda model, _: None))
    with pytest.raises(UsageError, match="verdict UserVerdict is not valid: only causes for scenarios can be searched"):
        explained(verdict)
