"""Third-party layer kind; the docs show this file."""

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
    """Low-rank linear with a residual."""

    tag: ClassVar[str] = "low_rank"
    rank: int
    """Features between the two linears."""
    residual: bool = True
    """Whether the layer adds its input to its output."""
    frozen: bool = False
    """Whether its parameters have `requires_grad=False`."""


class LowRankKind(LayerKind):
    """Two linears with few features between them."""

    noun: ClassVar[type[AnyLayer]] = LowRank

    def parameters(self, layer: LowRank, in_features: int) -> tuple[ParameterOf, ...]:
        """Parameters in both linears."""
        narrow, wide = self.parts(layer)
        return (
            *part_parameters(narrow, in_features, layer.rank, bias=False),
            *part_parameters(wide, layer.rank, in_features, bias=False),
        )

    def parts(self, layer: LowRank) -> tuple[Part, ...]:
        """Both linears, for tensor parallelism."""
        return Part(name="narrow", reads_input=True), Part(name="wide", gives_output=True)

    def choices(self, layer: LowRank) -> tuple[ShardingChoice, ...]:
        """Sharding by the features between the linears."""
        return (ShardingChoice(split=Split.WITHIN, units=layer.rank, words="features between"),)

    def build(self, layer: LowRank, in_features: int) -> LayerModule:
        """Build a `LowRankModule`."""
        from unit.training.layers.third_party_module import LowRankModule

        return LowRankModule(layer, in_features)

    def script(self, layer: LowRank, in_features: int) -> LayerScript:
        """Code for exported scripts."""
        made = linear_lines(self.parameters(layer, in_features))
        return LayerScript(name="LowRank", words="Low rank", init=made, compute=("values = self.wide(self.narrow(inputs))",))

    def ready(self, layer: LowRank, in_features: int, *, autocast: bool = False) -> tuple[str, ...]:
        """Order in which backward produces gradients."""
        return ready_linears(self.parameters(layer, in_features), ("wide", "narrow"), autocast=autocast)

    def strategy(self, in_features: int) -> st.SearchStrategy[LowRank]:
        """Strategy for generated models."""
        return st.builds(LowRank, rank=st.integers(1, in_features))
