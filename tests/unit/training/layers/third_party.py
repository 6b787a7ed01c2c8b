"""Third-party layer kind; the docs show this file."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hypothesis import strategies as st

from equivcheck.scenario import AnyLayer, Split
from equivcheck.scenario.noun import frozen_dataclass
from equivcheck.training.layers.facts import LayerLinear, LayerParameter, LayerSharding, part_parameters, ready_linears
from equivcheck.training.layers.kind import LayerKind
from equivcheck.training.layers.script import LayerScript, linear_lines

if TYPE_CHECKING:
    from equivcheck.training.layers.module import LayerModule


@frozen_dataclass
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

    layer_class: ClassVar[type[AnyLayer]] = LowRank

    def parameters(self, layer: LowRank, in_features: int) -> tuple[LayerParameter, ...]:
        """Parameters in both linears."""
        narrow, wide = self.linears(layer)
        return (
            *part_parameters(narrow, in_features, layer.rank, bias=False),
            *part_parameters(wide, layer.rank, in_features, bias=False),
        )

    def linears(self, layer: LowRank) -> tuple[LayerLinear, ...]:
        """Both linears, for tensor parallelism."""
        return LayerLinear(name="narrow", reads_input=True), LayerLinear(name="wide", gives_output=True)

    def shardings(self, layer: LowRank) -> tuple[LayerSharding, ...]:
        """Sharding by the features between the linears."""
        return (LayerSharding(split=Split.HEADS_OR_HIDDEN, units=layer.rank, words="features between"),)

    def build(self, layer: LowRank, in_features: int) -> LayerModule:
        """Build a `LowRankModule`."""
        from unit.training.layers.third_party_module import LowRankModule

        return LowRankModule(layer, in_features)

    def script(self, layer: LowRank, in_features: int) -> LayerScript:
        """Code for exported scripts."""
        made = linear_lines(self.parameters(layer, in_features))
        return LayerScript(name="LowRank", words="Low rank", init=made, compute=("values = self.wide(self.narrow(inputs))",))

    def gradient_order(self, layer: LowRank, in_features: int, *, autocast: bool = False) -> tuple[str, ...]:
        """Order in which backward produces gradients."""
        return ready_linears(self.parameters(layer, in_features), ("wide", "narrow"), autocast=autocast)

    def strategy(self, in_features: int) -> st.SearchStrategy[LowRank]:
        """Strategy for generated models."""
        return st.builds(LowRank, rank=st.integers(1, in_features))
