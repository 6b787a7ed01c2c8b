"""What a mutant is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from equivcheck.errors import InvalidScenario
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Scenario
from equivcheck.system.choice import Choice

if TYPE_CHECKING:
    from equivcheck.training.setup import Setup


class Family(Choice):
    """What part of a parallel training is wrong."""

    DATA_PARALLEL = "data_parallel"
    ACCUMULATION = "accumulation"
    CLIPPING = "clipping"
    SHARDING = "sharding"
    TENSOR_PARALLEL = "tensor_parallel"
    SPMD = "spmd"
    PIPELINE = "pipeline"
    TOKENS = "tokens"
    EXPERTS = "experts"
    CONTEXT_PARALLEL = "context_parallel"
    OPTIMIZER = "optimizer"
    PRECISION = "precision"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """The smallest scenario that shows a mutant, by reasoning."""

    ranks: int = 2
    """Ranks it takes."""
    layers: int = 1
    """Layers it takes."""
    steps: int = 1
    """Steps it takes."""
    because: str
    """Why it takes no less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One way in which a parallel training is wrong while the reference stays right."""

    name: str
    """Unique, of lower-case words joined by underscores."""
    wrong: str
    """What is wrong, in one sentence."""
    family: Family
    """Which part."""
    layouts: tuple[str, ...]
    """Names of the layouts whose scenarios it may be planted in, at least one; the first is where it is seen most simply."""
    applies: Callable[[Scenario], bool] = lambda _scenario: True
    """Whether a scenario of these layouts has what it breaks. It says nothing of whether any number changes."""
    plant: Callable[[Setup], None]
    """Changes the setup of a rank after its layout has been applied; importable by its name, as ranks may be processes."""
    causes: tuple[Cause, ...]
    """The right diagnosis first, then others that are as right (a sum over two ranks may be both summed and scaled)."""
    minimum: Minimum
    """The smallest scenario that shows it."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name != self.name.lower():
            raise InvalidScenario(f"Mutant.name is {self.name!r}; allowed: lower-case words joined by underscores")
        for field in ("layouts", "causes"):
            if not getattr(self, field):
                raise InvalidScenario(f"Mutant.{field} of {self.name!r} is empty; allowed: at least one")


Fault = TypeVar("Fault", bound="Callable[[Setup], None]")

BUILT_IN: dict[str, list[Mutant]] = {}
"""Mutants that ship, by the name of their module; filled as modules are imported."""


def fault(
    *,
    layouts: tuple[str, ...],
    applies: Callable[[Scenario], bool] = lambda _scenario: True,
    causes: tuple[Cause, ...],
    minimum: Minimum,
) -> Callable[[Fault], Fault]:
    """Register the function below as what a mutant plants: see `register`, and `Mutant` for the arguments."""

    def registered(plant: Fault) -> Fault:
        register(plant, plant=plant, layouts=layouts, applies=applies, causes=causes, minimum=minimum)
        return plant

    return registered


def register(  # noqa: PLR0913 - the fields of a mutant, by keyword
    function: Callable[..., object],
    *,
    plant: Callable[[Setup], None],
    layouts: tuple[str, ...],
    applies: Callable[[Scenario], bool],
    causes: tuple[Cause, ...],
    minimum: Minimum,
) -> None:
    """Add a mutant that ships: its name is that of a function, what is wrong its docstring, and the family its folder."""
    module = function.__module__
    BUILT_IN.setdefault(module, []).append(
        Mutant(
            name=function.__name__,
            wrong=str(function.__doc__),
            family=Family(module.split(".")[2]),
            layouts=layouts,
            applies=applies,
            plant=plant,
            causes=causes,
            minimum=minimum,
        )
    )
