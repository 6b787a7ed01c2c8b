"""A kind of layer as a third party would write it; the docs show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hypothesis import strategies as st

from equivcheck.scenario import AnyLayer, Split
from equivcheck.scenario.noun import noun
from equivcheck.training.layers.facts import ParameterOf, Part, ShardingChoice, part_parameters, ready_linears
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.script import LayerScript, linear_lines

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


@noun
class LowRank(AnyLayer):
    """A linear of low rank beside its input."""

    tag: ClassVar[str] = "low_rank"
    rank: int
    """Features between."""
    residual: bool = True
    """Whether the input is added."""
    frozen: bool = False
    """Whether its parameters require no gradient."""


class LowRankKind(LayerKind):
    """Two linears, one narrow."""

    noun: ClassVar[type[AnyLayer]] = LowRank

    def parameters(self, layer: LowRank, inputs: int) -> tuple[ParameterOf, ...]:
        """Those of both linears."""
        narrow, wide = self.parts(layer)
        return (
            *part_parameters(narrow, inputs, layer.rank, bias=False),
            *part_parameters(wide, layer.rank, inputs, bias=False),
        )

    def parts(self, layer: LowRank) -> tuple[Part, ...]:
        """Both, as tensor parallelism has to know them."""
        return Part(name="narrow", reads_input=True), Part(name="wide", gives_output=True)

    def choices(self, layer: LowRank) -> tuple[ShardingChoice, ...]:
        """Ranks share out the features between."""
        return (ShardingChoice(split=Split.WITHIN, units=layer.rank, words="features between"),)

    def build(self, layer: LowRank, inputs: int) -> LayerModule:
        """Its module."""
        from unit.training.layers.third_party_module import LowRankModule

        return LowRankModule(layer, inputs)

    def script(self, layer: LowRank, inputs: int) -> LayerScript:
        """How an exported script writes it."""
        made = linear_lines(self.parameters(layer, inputs))
        return LayerScript(name="LowRank", words="Low rank", init=made, compute=("values = self.wide(self.narrow(inputs))",))

    def ready(self, layer: LowRank, inputs: int, *, autocast: bool = False) -> tuple[str, ...]:
        """In which order backward has gradients ready."""
        return ready_linears(self.parameters(layer, inputs), ("wide", "narrow"), autocast=autocast)

    def strategy(self, inputs: int) -> st.SearchStrategy[LowRank]:
        """How it is drawn."""
        return st.builds(LowRank, rank=st.integers(1, inputs))
