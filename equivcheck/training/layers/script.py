"""How exported scripts write layers."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.scenario import Activation, Norm
from equivcheck.training.layers.facts import ParameterOf


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScript:
    """A layer as a class of an exported script."""

    name: str
    """What the class may be called; layers of one text share it."""
    words: str
    """What it is, for its docstring."""
    init: tuple[str, ...]
    """Lines that make its modules, by the names that parameters have here."""
    compute: tuple[str, ...]
    """Lines that map ``inputs`` to ``values``; dropout and the residual come after."""
    functions: tuple[tuple[str, ...], ...] = ()
    """Functions that these call, line by line."""
    imports: tuple[tuple[str, str], ...] = ()
    """Modules, and the names in them, that these need."""
    methods: tuple[tuple[str, ...], ...] = ()
    """Methods of the class beside these, line by line."""
    of_parts: LayerScript | None = None
    """How it is written where ranks have some of the positions, and ``self.sequence`` says which; None for the same."""
    of_units: LayerScript | None = None
    """How it is written where ranks share out its units, and ``self.by_units`` computes rows by them; None for the same."""
    of_region: LayerScript | None = None
    """How it is written where each rank computes an addend, and ``self.region`` moves values; None for the same."""


NORMS: dict[Norm, str] = {Norm.LAYER: "nn.LayerNorm", Norm.RMS: "nn.RMSNorm"}
"""As scripts write them."""

ACTIVATIONS: dict[Activation, tuple[str, str]] = {
    Activation.RELU: ("nn.ReLU()", "torch.relu"),
    Activation.GELU: ("nn.GELU()", "functional.gelu"),
    Activation.TANH: ("nn.Tanh()", "torch.tanh"),
    Activation.SIGMOID: ("nn.Sigmoid()", "torch.sigmoid"),
    Activation.SILU: ("nn.SiLU()", "functional.silu"),
}
"""As scripts write them, as a module and as a function; the identity is left out."""


def norm_line(norm: Norm | None, features: int) -> tuple[str, ...]:
    """What makes a normalisation, if there is any."""
    return () if norm is None else (f"self.norm = {NORMS[norm]}({features})",)


def linear_lines(parameters: tuple[ParameterOf, ...]) -> tuple[str, ...]:
    """What makes the linears that have these weights and biases."""
    names = {parameter.name for parameter in parameters}
    made = []
    for parameter in parameters:
        owner, _, attribute = parameter.name.partition(".")
        if attribute == "weight" and owner != "norm":
            outputs, inputs = parameter.shape
            made.append(f"self.{owner} = nn.Linear({inputs}, {outputs}{'' if f'{owner}.bias' in names else ', bias=False'})")
    return tuple(made)
