"""Classes for layers that need more than `nn.Sequential`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equivcheck.layouts.base.script.text import INDENT, block, indent_lines
from equivcheck.scenario import Activation, AuxiliaryLinear, Layer, Norm, ShapeOp
from equivcheck.scenario.execution import KEPT_PRODUCTS
from equivcheck.scenario.layers.linear import ARANGE_STEP
from equivcheck.training.layers.script import ACTIVATIONS, NORMS, LayerScript

_SHAPE_OPS: dict[ShapeOp, tuple[str, str]] = {
    ShapeOp.FLATTEN: ("a flat view and back", "values.flatten().view(values.shape)"),
    ShapeOp.SQUEEZE: ("a dim of size one, added and removed", "values.view(values.shape[0], 1, values.shape[1]).squeeze(1)"),
    ShapeOp.UNSQUEEZE: ("a dim of size one, added and removed", "values.unsqueeze(0).mean(0)"),
    ShapeOp.VIEW: ("a view and back", "values.unflatten(1, {halves}).flatten(1)"),
    ShapeOp.REPEAT: ("a repeat and its mean", "values.unsqueeze(1).repeat(1, 2, 1).mean(1)"),
    ShapeOp.ARANGE: ("the feature index added", "values + {made}.repeat(values.shape[0], 1)"),
    ShapeOp.ONES: ("one added", "values + torch.ones_like(values)"),
    ShapeOp.ZEROS: ("zero added", "values + values.new_zeros((values.shape[0], 1))"),
}
"""Comment and expression in a script for each shape operation."""
_AGAIN = ", recomputed in backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearClass:
    """Options of a class for linear layers in an exported script."""

    norm: Norm | None
    bias: bool
    activation: Activation
    residual: bool
    masked: bool
    auxiliary: AuxiliaryLinear | None
    shape_op: ShapeOp | None
    recomputes: bool
    keeps_products: bool = False
    offloads: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether `nn.Sequential` can express the layer. It then needs no class."""
        return not (self.residual or self.masked or self.auxiliary or self.shape_op or self.recomputes or self.offloads)

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of further arguments for ``forward``, after the inputs."""
        return ("mask",) * self.masked + ("step",) * (self.auxiliary is AuxiliaryLinear.EVEN_STEPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedClass:
    """Options of a class for layers of one kind in an exported script."""

    is_plain: ClassVar[bool] = False
    script: LayerScript
    masked: bool
    residual: bool
    recomputes: bool
    keeps_products: bool = False
    offloads: bool = False

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of further arguments for ``forward``, after the inputs."""
        return ("mask",) * self.masked


def linear_class(layer: Layer, *, recomputes: bool, keeps_products: bool, offloads: bool) -> LinearClass:
    """Return the options of the script's class for a linear layer.

    With `recomputes`, backward runs the layer's forward again. With `keeps_products`, forward saves the results of matrix
    products, and backward does not recompute them. With `offloads`, tensors saved for backward stay in host memory.
    """
    return LinearClass(
        norm=layer.norm,
        bias=layer.bias,
        activation=layer.activation,
        residual=layer.residual,
        masked=layer.dropout > 0,
        auxiliary=layer.auxiliary,
        shape_op=layer.shape_op,
        recomputes=recomputes,
        keeps_products=keeps_products,
        offloads=offloads,
    )


def class_of(name: str, kind: LinearClass | ScriptedClass, *, distributed: bool) -> list[str]:
    """Return the lines of a class definition. With `distributed`, constants become DTensors if the activations are DTensors."""
    if isinstance(kind, ScriptedClass):
        values = "values" + " * mask" * kind.masked + " + inputs" * kind.residual
        made, words = ["super().__init__()", *kind.script.init], kind.script.words + _AGAIN * kind.recomputes
        written = _class((name, words, "self"), made, kind, [*kind.script.compute, f"return {values}"])
        return [*written, *(line for method in kind.script.methods for line in ("", *indent_lines(list(method))))]
    linear = "nn.Linear(inputs, width" + ("" if kind.bias else ", bias=False") + ")"
    made = ["super().__init__()"]
    made += [f"self.norm = {NORMS[kind.norm]}(inputs)"] if kind.norm else []
    made += [f"self.linear = {linear}"]
    made += ["self.auxiliary = nn.Linear(inputs, width, bias=False)"] if kind.auxiliary else []
    return _class((name, _words(kind), "self, inputs: int, width: int"), made, kind, _compute(kind, distributed))


def _class(given: tuple[str, str, str], made: list[str], kind: LinearClass | ScriptedClass, lines: list[str]) -> list[str]:
    name, words, arguments = given
    return [
        f"class {name}(nn.Module):",
        f'{INDENT}"""{words}."""',
        "",
        *indent_lines(block(f"def __init__({arguments}) -> None:", made)),
        "",
        *indent_lines(_forward(kind, lines)),
    ]


def _forward(kind: LinearClass | ScriptedClass, lines: list[str]) -> list[str]:
    arguments = ", ".join(("inputs", *kind.extras))
    if kind.offloads:
        lines = block("with save_on_cpu():", lines)
    if not kind.recomputes:
        return block(f"def forward(self, {arguments}):", lines)
    products = ", ".join(f"torch.ops.aten.{name}.default" for name in KEPT_PRODUCTS)
    selective = f", context_fn=partial(create_selective_checkpoint_contexts, [{products}])"
    again = [f"return checkpoint(self.compute, {arguments}, use_reentrant=False{selective * kind.keeps_products})"]
    return [*block(f"def forward(self, {arguments}):", again), "", *block(f"def compute(self, {arguments}):", lines)]


def _compute(kind: LinearClass, distributed: bool) -> list[str]:
    lines = ["normed = self.norm(inputs)"] if kind.norm and kind.auxiliary is AuxiliaryLinear.EVEN_STEPS else []
    normed = "normed" if lines else "self.norm(inputs)" if kind.norm else "inputs"
    values = f"self.linear({normed})"
    if kind.auxiliary is AuxiliaryLinear.EVEN_STEPS:
        lines += [f"values = {values}", "if step % 2 == 0:", f"{INDENT}values = values + self.auxiliary({normed})"]
        values = "values"
    if kind.activation in ACTIVATIONS:
        values = f"{ACTIVATIONS[kind.activation][1]}({values})"
    values += " * mask" * kind.masked + " + inputs" * kind.residual
    if kind.shape_op is not None:
        lines += [f"values = {values}"] if values != "values" else []
        made = f"{ARANGE_STEP} * torch.arange(values.shape[1], dtype=values.dtype)"
        made = f"beside(values, {made})" if distributed else f"({made})"
        halves = "(2, values.shape[1] // 2) if values.shape[1] % 2 == 0 else (values.shape[1], 1)"
        values = _SHAPE_OPS[kind.shape_op][1].format(made=made, halves=halves)
    return [*lines, f"return {values}"]


def _words(kind: LinearClass) -> str:
    beside = {
        AuxiliaryLinear.NEVER: "a second linear that never runs",
        AuxiliaryLinear.EVEN_STEPS: "a second linear at even steps",
    }
    parts = [beside[kind.auxiliary]] if kind.auxiliary else []
    parts += ["dropout"] * kind.masked + ["a residual"] * kind.residual
    parts += [_SHAPE_OPS[kind.shape_op][0]] if kind.shape_op else []
    words = "A linear with " + " and ".join(parts) if parts else "A linear"
    return words + _AGAIN * kind.recomputes


def imports_of(kind: LinearClass | ScriptedClass) -> list[tuple[str, str]]:
    """Imports for the script's class, as pairs (module, name)."""
    found = [("torch.utils.checkpoint", "checkpoint")] if kind.recomputes else []
    if kind.offloads:
        found.append(("torch.autograd.graph", "save_on_cpu"))
    if kind.keeps_products:
        found += [("functools", "partial"), ("torch.utils.checkpoint", "create_selective_checkpoint_contexts")]
    if isinstance(kind, ScriptedClass):
        return [*found, *kind.script.imports]
    uses_functional = not kind.is_plain and ACTIVATIONS.get(kind.activation, ("", ""))[1].startswith("functional.")
    return found + ([("torch.nn", "functional")] if uses_functional else [])
