"""How a training is spread over ranks."""

from __future__ import annotations

from typing import TypeVar

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.execution import Execution
from equivcheck.scenario.mesh import DP, EP, REPLICATE, SHARD, Mesh
from equivcheck.scenario.noun import noun
from equivcheck.scenario.parallelism import FSDP1
from equivcheck.scenario.parallelism_base import Parallelism

P = TypeVar("P", bound=Parallelism)


@noun
class Layout:
    """A mesh and what happens along its axes."""

    mesh: Mesh
    """The ranks."""
    parallelisms: tuple[Parallelism, ...]
    """What is applied, innermost first; together they take each axis of the mesh exactly once."""
    execution: Execution = Execution()
    """How each rank runs its part."""

    def __post_init__(self) -> None:
        if not self.parallelisms:
            raise InvalidScenario("Layout.parallelisms is (); allowed: at least one parallelism")
        if len(self.parallelisms) > len(self.mesh.axes):
            allowed = f"at most one for each of the axes {list(self.mesh.names)}"
            raise InvalidScenario(f"Layout.parallelisms has {len(self.parallelisms)} parallelisms; allowed: {allowed}")
        taken = [name for parallelism in self.parallelisms for name in self.axes_of(parallelism)]
        if sorted(taken) != sorted(self.mesh.names):
            raise InvalidScenario(f"Layout.parallelisms {self.name} take the axes {taken}; the mesh has {list(self.mesh.names)}")
        for parallelism in self.parallelisms:
            parallelism.require_ranks(self.mesh.size(*self.axes_of(parallelism)))
            if isinstance(parallelism, FSDP1) and parallelism.strategy.is_hybrid != (len(self.axes_of(parallelism)) == 2):
                raise InvalidScenario(
                    f"FSDP1.strategy is {parallelism.strategy!r}; allowed: a hybrid one exactly on the axes {REPLICATE}, {SHARD}"
                )

    def axes_of(self, parallelism: Parallelism) -> tuple[str, ...]:
        """The mesh axes that a parallelism of this layout spreads over."""
        for names in parallelism.axes:
            if set(names) <= set(self.mesh.names):
                return names
        alternatives = " or ".join(str(names) for names in parallelism.axes)
        raise InvalidScenario(f"Mesh.axes has the names {self.mesh.names}; {parallelism.tag} needs {alternatives}")

    def of(self, *kinds: type[P]) -> tuple[P, ...]:
        """Its parallelisms of some kinds, innermost first."""
        return tuple(parallelism for parallelism in self.parallelisms if isinstance(parallelism, kinds))

    def has(self, *kinds: type[Parallelism]) -> bool:
        """Whether it has a parallelism of one of some kinds."""
        return bool(self.of(*kinds))

    @property
    def name(self) -> str:
        """The tags of its parallelisms, outermost first: ``fsdp2 x tensor_parallel``."""
        return " x ".join(parallelism.tag for parallelism in reversed(self.parallelisms))

    @property
    def redistributes_gradients(self) -> bool:
        """Whether an optimizer gets gradients that are placed as their parameters are."""
        return all(getattr(parallelism, "redistribute_gradients", True) for parallelism in self.parallelisms)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different rows of the batch."""
        return self.mesh.size(DP, REPLICATE, SHARD, EP)
