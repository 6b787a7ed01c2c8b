"""How positions are cut over ranks, as one device sees it that has all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.words import listed, over
from equivcheck.layouts.parallelisms.context_parallel.positions import positions_of_ranks
from equivcheck.scenario import Attention, ContextParallel
from equivcheck.scenario.mesh import CP
from equivcheck.training.layers.attention.module import AttentionModule
from equivcheck.training.setup import Setup


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cut:
    """The positions of several ranks."""

    parts: tuple[torch.Tensor, ...]
    """Those of each, in the order in which it has them."""
    where: str
    """The ranks, in words."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.parts)

    @property
    def owner(self) -> torch.Tensor:
        """Which rank has each position, (length,)."""
        return self._laid([torch.full_like(part, rank) for rank, part in enumerate(self.parts)])

    @property
    def local(self) -> torch.Tensor:
        """Where each position lies among those of its rank, (length,)."""
        return self._laid([torch.arange(len(part)) for part in self.parts])

    @property
    def place(self) -> torch.Tensor:
        """Where each position lies if those of ranks are laid in a row, (length,)."""
        return self._laid([torch.arange(sum(map(len, self.parts)))])

    def _laid(self, values: list[torch.Tensor]) -> torch.Tensor:
        order = torch.cat(self.parts)
        found = torch.empty_like(order)
        found[order] = torch.cat(values)
        return found


def cut_of(diverged: DivergedRun) -> Cut | None:
    """How a layout cuts positions over several ranks; None where it does not, or rounds."""
    found, size, length = diverged.layout.of(ContextParallel), diverged.mesh.size(CP), diverged.training.model.length
    if not found or size == 1 or length is None or diverged.rounding is not None:
        return None
    parts = tuple(torch.tensor(part, dtype=torch.int64) for part in positions_of_ranks(found[0], length, size))
    return Cut(parts=parts, where=over(diverged.mesh, (CP,)))


def attentions(diverged: DivergedRun, **having: bool) -> Iterator[tuple[int, ...]]:
    """The layers of attention that have such fields: all of them, then each."""
    found = tuple(
        index
        for index, layer in enumerate(diverged.training.model.layers)
        if isinstance(layer, Attention) and all(getattr(layer, name) == value for name, value in having.items())
    )
    return iter(dict.fromkeys((found, *((index,) for index in found))) if found else ())


def named(layers: tuple[int, ...]) -> str:
    """Attention in these layers."""
    return f"attention in {listed([f'`layers.{layer}`' for layer in layers])}"


def modules_of(setup: Setup, layers: tuple[int, ...]) -> Iterator[AttentionModule]:
    """The modules of such layers."""
    for layer in layers:
        module = setup.model.get_submodule(f"layers.{layer}")
        assert isinstance(module, AttentionModule), "it was chosen for its attention"
        yield module
