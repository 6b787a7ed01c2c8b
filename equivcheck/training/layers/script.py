"""Code for layers in exported scripts."""

from __future__ import annotations

from dataclasses import dataclass

from equivcheck.scenario import Activation, Norm
from equivcheck.training.layers.facts import LayerParameter


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScript:
    """Source code for the module class that an exported script uses for one layer."""

    name: str
    """Preferred class name. Layers with identical code share a class."""
    words: str
    """Docstring for the class."""
    init: tuple[str, ...]
    """Lines in `__init__` that create the submodules. Submodules have the names that `LayerParameter` uses."""
    compute: tuple[str, ...]
    """Lines in `forward` that compute ``values`` from ``inputs``. Dropout and residual are added after these lines."""
    functions: tuple[tuple[str, ...], ...] = ()
    """Functions that the class calls, each as its lines."""
    imports: tuple[tuple[str, str], ...] = ()
    """Imports that the code needs: module and name."""
    methods: tuple[tuple[str, ...], ...] = ()
    """Further methods in the class, each as its lines."""
    for_packed_documents: LayerScript | None = None
    """Code for packed documents of ``DOCUMENT_LENGTH`` positions; None if it is the same."""
    for_context_parallel: LayerScript | None = None
    """Code for context parallelism, which computes attention by ``self.sequence``; None if it is the same."""
    for_expert_parallel: LayerScript | None = None
    """Code for expert parallelism, which computes experts by ``self.by_units``; None if it is the same."""
    for_tensor_parallel: LayerScript | None = None
    """Code for tensor parallelism inside experts, which communicates by ``self.region``; None if it is the same."""


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
    """Return a tuple with the script line that creates a norm; an empty tuple if there is no norm."""
    return () if norm is None else (f"self.norm = {NORMS[norm]}({features})",)


def linear_lines(parameters: tuple[LayerParameter, ...]) -> tuple[str, ...]:
    """Return the script lines that create the linears with these weights and biases."""
    names = {parameter.name for parameter in parameters}
    made = []
    for parameter in parameters:
        owner, _, attribute = parameter.name.partition(".")
        if attribute == "weight" and owner != "norm":
            outputs, inputs = parameter.shape
            made.append(f"self.{owner} = nn.Linear({inputs}, {outputs}{'' if f'{owner}.bias' in names else ', bias=False'})")
    return tuple(made)
