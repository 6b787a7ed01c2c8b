"""A backward that is wrong on purpose is found, by the model and by the inner products, in each function of each form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives import gradient_programs
from collectives.cases import REDUCTIONS, Case, Kind, Values
from collectives.gradients import COMBINATIONS, OF_FIRST_RANKS, Derivative, Form
from collectives.programs import Tensors
from collectives.test_gradients import assert_differentiated, assert_transposed
from collectives.worlds import run_in
from equivcheck.system.torch_version import is_torch_in

Spoil = Callable[[Derivative, int, torch.Tensor], torch.Tensor]


def _as_it_lies(_: Derivative, __: int, gradient: torch.Tensor) -> torch.Tensor:
    """What is read of a transposed gradient by who takes memory as it lies."""
    return gradient.permute(*reversed(range(gradient.dim()))).contiguous().view(gradient.shape)


SPOILT: dict[str, Spoil] = {
    "a mean instead of a sum": lambda derivative, _, gradient: gradient / len(derivative.case.group),
    "parts in another order": lambda _, __, gradient: gradient.flip(0),
    "lost": lambda _, __, gradient: torch.zeros_like(gradient),
    "memory as it lies": _as_it_lies,
    "rank within the group taken for the global one": lambda _, member, gradient: gradient * (member == dist.get_rank()),
}
"""What becomes of the gradient of each output."""


def shown(form: Form, kind: Kind) -> Derivative:
    """A call of the last two of three ranks, or of the first two where torch can do no other."""
    first = form is Form.NN and kind in OF_FIRST_RANKS and is_torch_in(OF_FIRST_RANKS[kind])
    group, op = (0, 1) if first else (1, 2), "sum" if kind in REDUCTIONS else ""
    case = Case(kind=kind, group=group, shape=(3, 2), op=op, values=Values.NORMAL, seed=3)
    if kind is Kind.ALL_TO_ALL_SINGLE:
        rows = ((0, 3), (3, 0)) if form is Form.PERMUTE else ((1, 2), (3, 2))
        case = replace(case, shape=() if form is Form.PERMUTE else (2,), rows=rows)
    return Derivative(form=form, case=case)


def spoiling(compute: Callable[..., list[Tensors]], spoil: Spoil) -> Callable[..., list[Tensors]]:
    """The same functions with another backward."""

    def spoilt(derivative: Derivative, group: Any, member: int, inputs: Tensors) -> list[Tensors]:
        outputs = compute(derivative, group, member, inputs)
        for tensor in (tensor for tensors in outputs for tensor in tensors):
            tensor.register_hook(lambda gradient: spoil(derivative, member, gradient))
        return outputs

    return spoilt


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize(("form", "kind"), COMBINATIONS)
def test_a_wrong_backward_is_found(form: Form, kind: Kind, spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bug both ways to look agree; with it neither does."""
    derivative = shown(form, kind)
    if derivative.case.group[0] == 0 and "global" in spoil:
        pytest.skip("torch has the function for groups of the first ranks only")
    if form is Form.PERMUTE and "memory" in spoil:
        pytest.skip("one dim lies in one way")
    pairs = run_in("sim", 3, gradient_programs.differentiate_or_raise, derivative)
    assert_differentiated(derivative, pairs)
    assert_transposed(derivative, pairs)
    monkeypatch.setitem(gradient_programs.COMPUTE, form, spoiling(gradient_programs.COMPUTE[form], SPOILT[spoil]))
    pairs = run_in("sim", 3, gradient_programs.differentiate_or_raise, derivative)
    with pytest.raises(AssertionError, match="instead of"):
        assert_differentiated(derivative, pairs)
    with pytest.raises(AssertionError, match="backward in"):
        assert_transposed(derivative, pairs)
