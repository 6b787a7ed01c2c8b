"""What a mutant is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from equivcheck.choice import Choice
from equivcheck.errors import InvalidScenario
from equivcheck.scenario import Scenario
from equivcheck.verdict.cause import Cause

if TYPE_CHECKING:
    from equivcheck.train.setup import Setup


class Family(Choice):
    """What part of a parallel training is wrong."""

    DATA_PARALLEL = "data_parallel"
    ACCUMULATION = "accumulation"
    CLIPPING = "clipping"
    SHARDING = "sharding"
    TENSOR_PARALLEL = "tensor_parallel"
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
