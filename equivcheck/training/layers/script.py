"""Code for layers in exported scripts."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.scenario import Activation, Norm
from equivcheck.training.layers.facts import LayerParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScript:
    """Class definition for a layer in an exported script."""

    name: str
    """Preferred class name. Layers with identical code share a class."""
    words: str
    """Docstring for the class."""
    init: tuple[str, ...]
    """Lines in `__init__` for the submodules, with the parameter names used here."""
    compute: tuple[str, ...]
    """Lines in `forward` that map ``inputs`` to ``values``. Dropout and residual are added after these lines."""
    functions: tuple[tuple[str, ...], ...] = ()
    """Functions called by the lines, line by line."""
    imports: tuple[tuple[str, str], ...] = ()
    """Imports for the lines: module and name."""
    methods: tuple[tuple[str, ...], ...] = ()
    """Further methods, line by line."""
    for_packed_documents: LayerScript | None = None
    """Variant for packed documents, which are ``DOCUMENT_LENGTH`` positions long; None if the code is the same."""
    for_context_parallel: LayerScript | None = None
    """Variant for context parallelism, with ``self.sequence`` for the local positions; None if the code is the same."""
    for_expert_parallel: LayerScript | None = None
    """Variant for expert parallelism, with ``self.by_units`` to compute rows; None if the code is the same."""
    for_tensor_parallel: LayerScript | None = None
    """Variant for tensor parallelism inside experts, with ``self.region`` for communication; None if the code is the same."""


NORMS: dict[Norm, str] = {Norm.LAYER: "nn.LayerNorm", Norm.RMS: "nn.RMSNorm"}
"""Norm modules as code."""

ACTIVATIONS: dict[Activation, tuple[str, str]] = {
    Activation.RELU: ("nn.ReLU()", "torch.relu"),
    Activation.GELU: ("nn.GELU()", "functional.gelu"),
    Activation.TANH: ("nn.Tanh()", "torch.tanh"),
    Activation.SIGMOID: ("nn.Sigmoid()", "torch.sigmoid"),
    Activation.SILU: ("nn.SiLU()", "functional.silu"),
}
"""Activations as code, as module and as function, without the identity."""


def norm_line(norm: Norm | None, features: int) -> tuple[str, ...]:
    """Return the script line for a norm; empty if there is no norm."""
    return () if norm is None else (f"self.norm = {NORMS[norm]}({features})",)


def linear_lines(parameters: tuple[LayerParameter, ...]) -> tuple[str, ...]:
    """Return script lines for the linears with these weights and biases."""
    names = {parameter.name for parameter in parameters}
    made = []
    for parameter in parameters:
        owner, _, attribute = parameter.name.partition(".")
        if attribute == "weight" and owner != "norm":
            outputs, inputs = parameter.shape
            made.append(f"self.{owner} = nn.Linear({inputs}, {outputs}{'' if f'{owner}.bias' in names else ', bias=False'})")
    return tuple(made)
