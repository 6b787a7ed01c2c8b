"""How a training is distributed over ranks."""

from __future__ import annotations

from typing import TypeVar

from equivcheck.errors import InvalidScenario
from equivcheck.scenario.execution import Execution
from equivcheck.scenario.mesh import DP, EP, REPLICATE, SHARD, Mesh
from equivcheck.scenario.noun import frozen_dataclass
from equivcheck.scenario.parallelisms.base import Parallelism
from equivcheck.scenario.parallelisms.data_parallel import FSDP1

P = TypeVar("P", bound=Parallelism)


@frozen_dataclass
class Layout:
    """Device mesh, the parallelism on each of its axes, and how each rank executes its part."""

    mesh: Mesh
    """Device mesh of all ranks."""
    parallelisms: tuple[Parallelism, ...]
    """Parallelisms in order of application, innermost first. Together they use each mesh axis exactly once."""
    execution: Execution = Execution()
    """Compilation, activation checkpointing and time of the update."""

    def __post_init__(self) -> None:
        if not self.parallelisms:
            raise InvalidScenario("Layout.parallelisms () is not valid. Expected at least one parallelism.")
        if len(self.parallelisms) > len(self.mesh.axes):
            expected = f"at most one for each of the axes {list(self.mesh.names)}"
            raise InvalidScenario(f"Layout.parallelisms of length {len(self.parallelisms)} is not valid. Expected {expected}.")
        taken = [name for parallelism in self.parallelisms for name in self.axes_of(parallelism)]
        if sorted(taken) != sorted(self.mesh.names):
            raise InvalidScenario(
                f"Layout.parallelisms {self.name} is not valid: it uses the axes {taken}. "
                f"Expected each of the mesh's axes {list(self.mesh.names)} once."
            )
        for parallelism in self.parallelisms:
            axes = self.axes_of(parallelism)
            parallelism.require_ranks(self.mesh.size(*axes))
            if isinstance(parallelism, FSDP1) and parallelism.strategy.is_hybrid != (len(axes) == 2):
                raise InvalidScenario(
                    f"FSDP1.strategy {parallelism.strategy!r} is not valid on the axes {axes}. Expected a HYBRID strategy on the "
                    f"two axes {REPLICATE} and {SHARD}, and any other strategy on a single axis."
                )

    def axes_of(self, parallelism: Parallelism) -> tuple[str, ...]:
        """Mesh axes that a parallelism in this layout uses. Raises `InvalidScenario` if the mesh does not have these axes."""
        for names in parallelism.axes:
            if set(names) <= set(self.mesh.names):
                return names
        alternatives = " or ".join(str(names) for names in parallelism.axes)
        raise InvalidScenario(
            f"Mesh.axes with the names {self.mesh.names} is not valid with {parallelism.tag}. Expected {alternatives}."
        )

    def of(self, *kinds: type[P]) -> tuple[P, ...]:
        """Parallelisms in this layout that are instances of the given classes, innermost first as in `parallelisms`."""
        return tuple(parallelism for parallelism in self.parallelisms if isinstance(parallelism, kinds))

    def has(self, *kinds: type[Parallelism]) -> bool:
        """Whether any parallelism in this layout is an instance of a given class."""
        return bool(self.of(*kinds))

    @property
    def name(self) -> str:
        """Tags of the parallelisms, outermost first: ``fsdp2 x tensor_parallel``."""
        return " x ".join(parallelism.tag for parallelism in reversed(self.parallelisms))

    @property
    def redistributes_gradients(self) -> bool:
        """Whether all gradients get their parameters' placements before the optimizer uses them."""
        return all(getattr(parallelism, "redistribute_gradients", True) for parallelism in self.parallelisms)

    @property
    def propagates_placements(self) -> bool:
        """Whether activations are DTensors that are sharded by rows, so that the loss is that of the full batch."""
        return any(parallelism.propagates_placements for parallelism in self.parallelisms)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of rows in which a rank computes each microbatch: more than 1 only under pipelines."""
        return max(getattr(parallelism, "num_chunks", 1) for parallelism in self.parallelisms)

    def rows_of_forwards(self, microbatches: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many rows one forward on a rank gets, for each microbatch.

        `microbatches` are the numbers of rows over all ranks.
        """
        return tuple(-(-rows // self.num_data_ranks // self.num_chunks) for rows in microbatches)

    def has_equal_chunks(self, microbatches: tuple[int, ...]) -> bool:
        """Whether all ranks compute each microbatch in chunks with the same number of rows.

        `microbatches` are the numbers of rows over all ranks.
        """
        return all(rows % (self.num_data_ranks * self.num_chunks) == 0 for rows in microbatches)

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that get different rows."""
        return self.mesh.size(DP, REPLICATE, SHARD, EP)
