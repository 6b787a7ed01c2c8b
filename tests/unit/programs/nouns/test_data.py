"""The data given to operations can show errors, because values and gradients depend on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from equivcheck.programs.nouns import Constant, Leaf, Operation, TensorProgram
from equivcheck.programs.nouns.operations.registry import OPERATIONS
from equivcheck.programs.run.calls import results_of
from equivcheck.programs.run.values import full_tensor, weights_of
from equivcheck.programs.sweep.programs import Sweep
from equivcheck.system.torch_version import is_torch_in

from .test_operations import LATER

pytestmark = pytest.mark.filterwarnings("ignore")


CONSTANT = "writes a constant, or says what shape a tensor has"
DRAWS = "draws random numbers from a seed of its own"
NO_ZEROS = "counts numbers that are not zero: no leaf has a zero, so each part of a rank counts its own size"
NOTHING = "has no elements"
SAME_FOR_ALL_DATA = {
    **dict.fromkeys(("zeros_like", "full_like", "new_zeros", "new_ones", "zeros_like_int", "empty_like_filled"), CONSTANT),
    **dict.fromkeys(("new_empty_strided_filled", "new_zeros_other", "zeros_like_bool", "ones_like_int", "zero_"), CONSTANT),
    **dict.fromkeys(("fill_", "foreach_zero_", "dropout_all", "uniform_of_one_number", "normal_of_one_number"), CONSTANT),
    **dict.fromkeys(("init_constant", "init_zeros", "init_eye", "is_same_size"), CONSTANT),
    **dict.fromkeys(("seeded_rand_like", "seeded_randn_like", "seeded_randint_like", "seeded_uniform_", "seeded_normal_"), DRAWS),
    **dict.fromkeys(("seeded_bernoulli_", "seeded_exponential_", "seeded_init_normal", "seeded_init_kaiming"), DRAWS),
    **dict.fromkeys(("generated_uniform_", "generated_normal_", "generated_bernoulli_", "generated_init_uniform"), DRAWS),
    **dict.fromkeys(("norm_0", "count_nonzero"), NO_ZEROS),
    "slice_nothing": NOTHING,
}
"""Operations with the same value for all numbers, and the reason."""
SEEDS = range(0, 64, 8)
"""Seeds with the same remainder by 8, which a leaf adds to its numbers."""
BEYOND = 16.0
"""Factor for numbers larger than all drawn ones."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Results for some numbers, in comparable form."""

    value: Any
    gradients: Any


def _numbers(statement: Leaf | Constant, seed: int) -> torch.Tensor:
    """Other numbers for another seed: half of a larger tensor, because a leaf of the same size has the same numbers."""
    drawn = replace(statement, seed=statement.seed + seed)
    return full_tensor(replace(drawn, shape=(2, *drawn.shape)))[0].clone() if isinstance(drawn, Leaf) else full_tensor(drawn)


def _run(program: TensorProgram, seed: int, factor: float = 1.0) -> _Found | None:
    """None if torch refuses these numbers, or a result is not finite."""
    *given, operation = program.statements
    assert isinstance(operation, Operation)
    tensors = []
    for each in given:
        assert isinstance(each, (Leaf, Constant))
        numbers = _numbers(each, seed)
        tensors.append((numbers * factor).requires_grad_() if isinstance(each, Leaf) else numbers)
    try:
        outputs = results_of(operation.name, tensors, operation.dim)
    except Exception:
        return None
    if not all(each.isfinite().all() for each in outputs):
        return None
    return _Found([_listed(each) for each in outputs], _gradients(outputs[0], tensors))


def _gradients(output: torch.Tensor, tensors: list[torch.Tensor]) -> list[Any]:
    leaves = [each for each in tensors if each.requires_grad]
    if not output.requires_grad:
        return []
    try:
        weighted = (output.double() * weights_of(output.shape, 0)).sum()
        return [None if each is None else _listed(each) for each in torch.autograd.grad(weighted, leaves, allow_unused=True)]
    except (RuntimeError, IndexError):  # torch has no derivative of some
        return []


def _listed(tensor: torch.Tensor) -> Any:
    """Numbers that compare equal if ranks' would: -0.0 is 0.0."""
    return (tensor.detach().clone() + 0).tolist()


def _programs(name: str) -> Iterator[TensorProgram]:
    """Programs of the operation's sweep with replicated arguments: one for each set of shapes."""
    for program in Sweep(mesh=(1,), operations=(name,)).programs():
        if all(getattr(each, "placements", ("R",)) == ("R",) for each in program.statements):
            yield program


def _differ(runs: list[_Found | None], of: Callable[[_Found], Any]) -> bool:
    found = [of(each) for each in runs if each is not None]
    return any(first != second for first, second in itertools.pairwise(found))


def _depends_on_data(name: str, of: Callable[[_Found], Any]) -> bool:
    return any(_differ([_run(each, seed) for seed in SEEDS], of) for each in _programs(name))


def _depends_beyond(name: str, of: Callable[[_Found], Any]) -> bool:
    return any(_differ([_run(each, 0), _run(each, 0, BEYOND)], of) for each in _programs(name))


def test_the_value_of_every_operation_depends_on_the_data() -> None:
    """A constant value would not show which elements a rank has."""
    idle = {name for name in OPERATIONS if not _depends_on_data(name, lambda found: found.value)}
    assert idle == {*SAME_FOR_ALL_DATA, *(name for name, versions in LATER.items() if not is_torch_in(versions))}


def test_a_gradient_that_could_depend_on_the_data_does() -> None:
    """If the gradient is the same for all drawn data, it is also the same for larger numbers."""

    def gradients(found: _Found) -> Any:
        return found.gradients

    names = [name for name in OPERATIONS if _depends_beyond(name, gradients)]
    assert [name for name in names if not _depends_on_data(name, gradients)] == []
