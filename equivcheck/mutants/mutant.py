"""`Mutant` and how built-in mutants are registered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from equivcheck.errors import InvalidScenario
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import SPMD, Scenario
from equivcheck.system.choice import PrintableEnum

if TYPE_CHECKING:
    from equivcheck.training.setup import Setup


class Family(PrintableEnum):
    """Part of a parallel training that a mutant breaks."""

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
    """Size of the smallest scenario in which a mutant can be caught, stated by the mutant's author."""

    ranks: int = 2
    """Number of ranks needed."""
    layers: int = 1
    """Number of layers needed."""
    steps: int = 1
    """Number of steps needed."""
    because: str
    """Reason why a smaller scenario does not show the mutant."""


ONE_RANK = Minimum(ranks=1, because="one rank and one step show it")
TWO_RANKS = Minimum(because="over one rank the fault changes nothing")
WINDOW = Minimum(ranks=1, steps=2, because="the last of several steps has fewer microbatches")
TWO_STEPS = Minimum(ranks=1, steps=2, because="the first step is right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A fault that is planted in the ranks, while the single-device run stays right."""

    name: str
    """Unique lower-case name, words joined by underscores."""
    wrong: str
    """One sentence that describes the fault."""
    family: Family
    """Part of a training that the mutant breaks."""
    layouts: tuple[str, ...]
    """Layouts in which the mutant can be planted, at least one; the simplest comes first."""
    applies: Callable[[Scenario], bool] = lambda _scenario: True
    """Returns whether a scenario with one of these layouts uses the part that the mutant breaks. All values may still be right.
    """
    plant: Callable[[Setup], None]
    """Plants the fault in a rank's setup after its layout has been applied. Importable by name, because ranks may be processes.
    """
    causes: tuple[Cause, ...]
    """Correct diagnoses, the best one first. Several can be correct: a sum over two ranks may be `SUMMED` or `SCALED`."""
    minimum: Minimum
    """The smallest scenario that shows the mutant."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name != self.name.lower():
            raise InvalidScenario(f"Mutant.name {self.name!r} is not valid. Expected lower-case words joined by underscores")
        for field in ("layouts", "causes"):
            if not getattr(self, field):
                raise InvalidScenario(f"Mutant.{field} () of {self.name!r} is not valid. Expected at least one entry")


Fault = TypeVar("Fault", bound="Callable[[Setup], None]")

BUILT_IN: dict[str, list[Mutant]] = {}
"""Built-in mutants by the module that defines them. Importing a module adds its mutants."""


def fault(  # noqa: PLR0913 - options of a mutant, by keyword
    *,
    layouts: tuple[str, ...],
    applies: Callable[[Scenario], bool] = lambda _scenario: True,
    causes: tuple[Cause, ...],
    minimum: Minimum = TWO_RANKS,
    on_dtensor_values: bool = False,
    during_backward: bool = False,
) -> Callable[[Fault], Fault]:
    """Decorator that registers a function as a built-in mutant. For the arguments, see `Mutant`.

    By default, a mutant needs two ranks. If a layout makes activations DTensors, the mutant is planted only if SPMD is among
    `layouts` or `on_dtensor_values` is set. Most mutants change gradients or updates after backward. They are not planted in
    scenarios that update in backward, unless `during_backward` is set.
    """
    can_change_dtensors = on_dtensor_values or SPMD.tag in layouts

    def applies_to_values(scenario: Scenario) -> bool:
        propagates = any(layout.propagates_placements for layout in scenario.layouts)
        updates_early = any(layout.execution.optimizer_in_backward for layout in scenario.layouts)
        fits = (can_change_dtensors or not propagates) and (during_backward or not updates_early)
        return fits and applies(scenario)

    def register_fault(plant: Fault) -> Fault:
        register(plant, plant=plant, layouts=layouts, applies=applies_to_values, causes=causes, minimum=minimum)
        return plant

    return register_fault


def mistake_in(docstring: str) -> str:
    """Return the mistake in a docstring such as ``Bug: gradients are lost.``, with a capital letter and without ``Bug:``."""
    text = docstring.removeprefix("Bug: ")
    return text[:1].upper() + text[1:]


def register(  # noqa: PLR0913 - the fields of a mutant, by keyword
    function: Callable[..., object],
    *,
    plant: Callable[[Setup], None],
    layouts: tuple[str, ...],
    applies: Callable[[Scenario], bool],
    causes: tuple[Cause, ...],
    minimum: Minimum,
) -> None:
    """Register a built-in mutant. Its name is the function's, `wrong` comes from the docstring, and `family` is the folder."""
    module = function.__module__
    BUILT_IN.setdefault(module, []).append(
        Mutant(
            name=function.__name__,
            wrong=mistake_in(str(function.__doc__)),
            family=Family(module.split(".")[2]),
            layouts=layouts,
            applies=applies,
            plant=plant,
            causes=causes,
            minimum=minimum,
        )
    )
