"""Arguments of `check_training` that make no sense are told in one line."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from equivcheck import UsageError, check_training, explained
from equivcheck.scenario import ElementType, LowPrecision, MixedPrecision
from equivcheck.worlds.pool import ranks
from unit.user.programs import batches, brought, build

_counter = itertools.count(1)
_one = build()
_lock = threading.Lock()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": (2, 2)}, r"mesh is \(2, 2\); allowed: a dict of axis sizes"),
        ({"mesh": {}}, "mesh is {}; allowed: a dict"),
        ({"mesh": {"dp": 0}}, "mesh has 'dp': 0; allowed"),
        ({"mesh": {"dp": True}}, "mesh has 'dp': True; allowed"),
        ({"mesh": {"workers": 2}}, r"axis 'workers' of the mesh may cut the batch or not; say so by data_axes=\(...\)"),
        ({"data_axes": ("tp",)}, r"data_axes is \('tp',\); allowed: a tuple of axes of the mesh, dp"),
        ({"data_axes": "dp"}, "data_axes is 'dp'; allowed: a tuple"),
        ({"batches": []}, "batches is empty; allowed: at least one"),
        ({"batches": [[]]}, r"batch 0 is \[\]; allowed: at least one microbatch"),
        ({"batches": [torch.ones(4, 4)]}, r"batch 0 has a Tensor; allowed: a pair \(inputs, targets\)"),
        ({"batches": batches(3)}, "batch 0 has a tensor of 3 rows, which dp 2 cannot share out evenly; allowed: a multiple of 2"),
        ({"model": nn.Linear(4, 2), "loss": 3}, "loss is 3; allowed: a callable"),
        ({"step": 3}, "step is 3; allowed: a callable or None"),
        ({"reduction": "max"}, "reduction is 'max'; allowed: mean, sum"),
        ({"dtype": torch.int64}, "dtype is torch.int64; allowed: a floating-point"),
        ({"precision": "bf16"}, r"precision is 'bf16'; allowed: LowPrecision.BFLOAT16, .* \(autocast\), MixedPrecision\(param="),
        ({"precision": torch.bfloat16}, "precision is torch.bfloat16; allowed: LowPrecision.BFLOAT16"),
        (
            {"precision": MixedPrecision(param=torch.bfloat16)},  # type: ignore[arg-type]
            "precision has param torch.bfloat16; allowed: ElementType.FLOAT64, .*, or None",
        ),
        (
            {"precision": LowPrecision.BFLOAT16},
            "precision is LowPrecision.BFLOAT16 and dtype is torch.float64, which autocast leaves .*: dtype=torch.float32",
        ),
        ({"dropout_masks": 3}, "dropout_masks is 3; allowed: True, False"),
        (
            {"model": lambda: nn.Sequential(build(), nn.Dropout(0.1), nn.AlphaDropout(0.2)), "dropout_masks": True},
            r"\(by AlphaDropout '2', p=0.2\); allowed",
        ),
        ({"keep_dtype": "yes"}, "keep_dtype is 'yes'; allowed: True, False"),
        ({"keep_dtype": True, "dtype": None}, "keep_dtype is True with dtype None; allowed with dtype=torch.float64"),
        (
            {"keep_dtype": True, "dtype": torch.float32, "precision": MixedPrecision(param=ElementType.BFLOAT16)},
            r"keep_dtype is True with precision MixedPrecision\(param=.*; allowed with .*precision=None",
        ),
        ({"model": nn.Sequential(build(), nn.Dropout(0.1))}, r"\(by Dropout '1', p=0.1\)"),
        ({"model": lambda: None}, "model returned None; allowed: a torch.nn.Module"),
        ({"model": lambda: _one}, "model returns the same module, or parts of it, at each call"),
        ({"model": lambda: nn.Linear(4, 2).requires_grad_() if next(_counter) % 2 else build()}, "model gives another"),
        (
            {"model": lambda: nn.Sequential(build(), nn.Dropout())},
            r"at step 0 \(loss\).* \(by Dropout '1', p=0.5\); allowed",
        ),
        ({"loss": lambda outputs, targets: (outputs * torch.rand(())).mean()}, "random numbers were drawn; allowed: .* masks"),
        ({"model": lambda: nn.Linear(4, 2, dtype=torch.complex128), "dtype": None}, "weight is complex; allowed: real"),
        ({"optimizer": lambda parameters: None}, "optimizer returned None; allowed: a torch.optim.Optimizer"),
        ({"step": lambda *arguments: "done"}, "step returned 'done'; allowed: the loss"),
        ({"parallelize": lambda model, mesh: mesh}, "parallelize returned DeviceMesh.*; allowed: a torch.nn.Module, or None"),
        ({"full_tensors": lambda module: 3}, "full_tensors returned a int; allowed: a dict of tensors by name"),
        ({"world": "fake"}, "world 'fake' has no data to compare; allowed: sim, gloo"),
        ({"world": "mpi"}, "world 'mpi' does not exist; allowed: sim, gloo, fake"),
        ({"world": "gloo", "loss": lambda outputs, targets: _lock}, "loss is <function <lambda>.*cannot be copied to the"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_one_line_says_what_and_what_is_allowed(changes: dict[str, Any], words: str) -> None:
    """Every wrong argument is named with its value."""
    with pytest.raises(UsageError, match=words) as caught:
        check_training(**brought(**changes))
    assert "\n" not in str(caught.value)


def test_ranks_must_be_those_of_the_mesh() -> None:
    """Ranks that are given are as many as the mesh has."""
    with pytest.raises(UsageError, match="world has 3 ranks; allowed: the 2 of the mesh"):
        check_training(**brought(world=ranks("sim", 3)))


def test_what_one_device_raises_stays_as_it_is() -> None:
    """An error of the user's own code comes through, with a note of where it was raised."""
    with pytest.raises(ZeroDivisionError) as caught:
        check_training(**brought(loss=lambda outputs, targets: 1 / 0))
    assert "in the run on one device, with model and batches converted to torch.float64" in caught.value.__notes__[0]


def test_explained_takes_verdicts_of_scenarios() -> None:
    """Causes are tried in the nouns of a scenario, which a user's training has not: one line says so."""
    verdict = check_training(**brought(parallelize=lambda model, _: None))
    with pytest.raises(UsageError, match="verdict UserVerdict is not valid: causes are tried on scenarios only"):
        explained(verdict)
