"""Write a model as code, as `nn.Sequential` or with its own classes, and map parameter names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from equivcheck.layouts.base.script.blocks import LinearClass, ScriptedClass, class_of, imports_of, linear_class
from equivcheck.layouts.base.script.text import INDENT, block, call, indent_lines
from equivcheck.scenario import (
    FSDP1,
    FSDP2,
    Checkpointing,
    Layer,
    Layout,
    Model,
    Pipeline,
    PlannedParallelism,
    Replicate,
    Split,
    TensorParallel,
    Wrapping,
)
from equivcheck.scenario.scenario import Scenario
from equivcheck.training.layers.registry import layer_kind
from equivcheck.training.layers.script import ACTIVATIONS, NORMS, LayerScript


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The model as code in an exported script."""

    expression: str
    """Expression that builds the model."""
    classes: tuple[tuple[str, ...], ...]
    """Class definitions, as lines."""
    imports: tuple[tuple[str, str], ...]
    """Imports for the classes, as pairs (module, name)."""
    paths: dict[str, str]
    """Module paths in the script by canonical module name, for modules with parameters."""
    layers: tuple[str, ...]
    """For each layer, the expression for its module, or for its linear if the layer is not one module."""
    stack: str
    """Expression for the module with the layers."""
    is_all_layers: bool
    """Whether the module in `stack` contains the layers and nothing else."""
    extras: tuple[str, ...]
    """Names of the model's further arguments in the script, after the inputs."""

    arguments: tuple[tuple[str, ...], ...]
    """For each layer, the names of its arguments after the inputs."""

    def name_of(self, canonical: str) -> str:
        """Convert the scenario's name of a parameter or buffer to its name in the script."""
        owner, _, attribute = canonical.rpartition(".")
        return f"{self.paths[owner]}.{attribute}" if owner and owner in self.paths else canonical

    def translate_names(self, text: str) -> str:
        """Return a text with the scenario's parameter names replaced by the script's names."""
        for owner in sorted(self.paths, key=len, reverse=True):
            text = text.replace(f"{owner}.", f"{self.paths[owner]}.")
        return text


def form_of(scenario: Scenario) -> Form:
    """Return a scenario's model as code."""
    return _Forms(scenario).form()


class _Forms:
    def __init__(self, scenario: Scenario) -> None:
        self.model, self.layout = scenario.training.model, scenario.layout
        self.transposes = scenario.training.data.batch_dim == 1
        self.shards_positions = any(parallelism.shards_positions for parallelism in self.layout.parallelisms)
        self.shards_experts = any(parallelism.shards_experts for parallelism in self.layout.parallelisms)
        self.kinds = _with_own_functions(self._kind(index) for index in range(len(self.model.layers)))
        self.special = list(dict.fromkeys(kind for kind in self.kinds if not kind.is_plain))
        self.is_nested = bool(self.special) or _has_units(self.layout, self.model)

    def _kind(self, index: int) -> LinearClass | ScriptedClass:
        layer, recomputes = self.model.layers[index], self.layout.execution.checkpoints(index)
        keeps_products = self.layout.execution.checkpointing is Checkpointing.SELECTIVE
        offloads = self.layout.execution.checkpointing is Checkpointing.OFFLOAD
        if isinstance(layer, Layer):
            return linear_class(layer, recomputes=recomputes, keeps_products=keeps_products, offloads=offloads)
        script = layer_kind(layer).script(layer, self.model.in_features(index))
        assert script is not None, "the export refuses layer kinds without a script"
        if script.for_packed_documents is not None and self.model.packs_documents:
            script = script.for_packed_documents
        if script.for_context_parallel is not None and self.shards_positions:
            script = script.for_context_parallel
        if script.for_expert_parallel is not None and self.shards_experts:
            script = script.for_expert_parallel
        if script.for_tensor_parallel is not None and self._cuts_within(index):
            script = script.for_tensor_parallel
        return ScriptedClass(
            script=script,
            masked=layer.dropout > 0,
            residual=layer.residual,
            recomputes=recomputes,
            keeps_products=keeps_products,
            offloads=offloads,
        )

    def _cuts_within(self, index: int) -> bool:
        return any(parallelism.plan[index].split is Split.HEADS_OR_HIDDEN for parallelism in self.layout.of(PlannedParallelism))

    def form(self) -> Form:
        distributed = self.layout.propagates_placements
        others = [kind.script for kind in self.special if isinstance(kind, ScriptedClass)]
        documents = f"DOCUMENT_LENGTH = {self.model.document_length}  # positions of each document packed into a sequence"
        classes = [[documents]] if self.model.packs_documents else []
        classes += [list(function) for function in dict.fromkeys(each for script in others for each in script.functions)]
        classes += [class_of(self._class(kind), kind, distributed=distributed) for kind in self.special]
        extras = {name for kind in self.kinds for name in kind.extras}
        expression, stack = self._stack(), "model"
        if extras or self.transposes or self.model.counter or self.model.offset or self.model.scale or self.model.source:
            classes.append(self._whole(expression, distributed))
            expression, stack = "Model()", "model.layers"
        prefix = "layers." if stack == "model.layers" else ""
        return Form(
            expression=expression,
            classes=tuple(map(tuple, classes)),
            imports=tuple(found for kind in self.special for found in imports_of(kind)),
            paths={name: prefix + path for name, path in self._paths().items()},
            layers=tuple(f"{stack}[{index}]" for index in self._units()),
            stack=stack,
            is_all_layers=self.is_nested or all(len(self._modules(index)) == 1 for index in range(len(self.kinds))),
            arguments=tuple(self._arguments()),
            extras=tuple({"mask": "masks"}.get(name, name) for name in ("mask", "step") if name in extras),
        )

    def _class(self, kind: LinearClass | ScriptedClass) -> str:
        stem = _stem(kind)
        index = [other for other in self.special if _stem(other) == stem].index(kind)
        return f"{stem}{index + 1}" if index else stem

    def _modules(self, index: int) -> list[tuple[str, str]]:
        """Return the modules that form a plain layer, each with its canonical name.

        Modules without parameters have an empty name.
        """
        layer, inputs = self.model.layers[index], self.model.in_features(index)
        assert isinstance(layer, Layer), "only linear layers are written as a sequence of modules"
        frozen = ".requires_grad_(False)" if layer.frozen else ""
        bias = None if layer.bias else False
        found = [("norm", f"{NORMS[layer.norm]}({inputs}){frozen}")] if layer.norm else []
        found += [("linear", call("nn.Linear", str(inputs), str(layer.width), bias=bias) + frozen)]
        return found + ([("", ACTIVATIONS[layer.activation][0])] if layer.activation in ACTIVATIONS else [])

    def _layer(self, index: int) -> str:
        layer, kind = self.model.layers[index], self.kinds[index]
        if not kind.is_plain:
            frozen = ".requires_grad_(False)" if layer.frozen else ""
            sizes = (
                f"{self.model.in_features(index)}, {self.model.in_features(index + 1)}" if isinstance(kind, LinearClass) else ""
            )
            return f"{self._class(kind)}({sizes}){frozen}"
        modules = [code for _, code in self._modules(index)]
        return modules[0] if len(modules) == 1 else f"nn.Sequential({', '.join(modules)})"

    def _stack(self) -> str:
        indices = range(len(self.kinds))
        if self.is_nested:
            return f"nn.Sequential({', '.join(map(self._layer, indices))})"
        return f"nn.Sequential({', '.join(code for index in indices for _, code in self._modules(index))})"

    def _paths(self) -> dict[str, str]:
        paths: dict[str, str] = {}
        position = 0
        for index, kind in enumerate(self.kinds):
            if not kind.is_plain:
                owners = self._owners(index)
                paths |= {f"layers.{index}.{owner}": f"{index}.{owner}" for owner in owners}
                continue
            modules = self._modules(index)
            for place, (owner, _) in enumerate(modules):
                if owner:
                    path = f"{index}.{place}" if len(modules) > 1 else str(index)
                    paths[f"layers.{index}.{owner}"] = path if self.is_nested else str(position + place)
            position += len(modules)
        return paths

    def _owners(self, index: int) -> Iterable[str]:
        """Names of the layer's modules with parameters."""
        layer = self.model.layers[index]
        owners = (
            parameter.name.rpartition(".")[0] for parameter in layer_kind(layer).parameters(layer, self.model.in_features(index))
        )
        return dict.fromkeys([*owners, *(("linear",) if isinstance(layer, Layer) else ())])

    def _units(self) -> list[str]:
        """Return, for each layer, its unit's index in the stack."""
        paths = self._paths()
        return [str(index) if self.is_nested else paths[f"layers.{index}.linear"] for index in range(len(self.kinds))]

    def _whole(self, stack: str, distributed: bool) -> list[str]:
        model = self.model
        made = ["super().__init__()", *self._embedding(), f"self.layers = {stack}", *self._head()]
        made += ['self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))'] if model.counter else []
        made += [f'self.register_buffer("offset", torch.linspace(0.25, 0.75, {model.out_features}))'] if model.offset else []
        made += ["self.scale = nn.Parameter(torch.rand(()) + 0.5)"] if model.scale else []
        extras = [name for name in ("mask", "step") if any(name in kind.extras for kind in self.kinds)]
        arguments = ", ".join(["self", "inputs", *("masks" if name == "mask" else name for name in extras)])
        return [
            "class Model(nn.Module):",
            f'{INDENT}"""{self._words()}."""',
            "",
            *indent_lines(block("def __init__(self) -> None:", made)),
            "",
            *indent_lines(block(f"def forward({arguments}):", self._forward(bool(extras), distributed))),
        ]

    def _embedding(self) -> list[str]:
        source, width = self.model.source, self.model.features
        if source is None:
            return []
        frozen = ".requires_grad_(False)" * source.frozen
        padding = None if source.padding is None else source.padding
        made = [f"self.embedding = {call('nn.Embedding', str(source.vocabulary), str(width), padding_idx=padding)}{frozen}"]
        if source.learned_positions:
            made.append(f"self.positions = nn.Embedding({self.model.length}, {width}){frozen}")
            made += ["self.sequence = Sequence()"] * self.shards_positions
        return made

    def _head(self) -> list[str]:
        head, inputs = self.model.head, self.model.in_features(len(self.model.layers))
        if head is None:
            return []
        linear_key = '"linear"'
        parts = [f'"norm": {NORMS[head.norm]}({inputs})'] if head.norm else []
        linear = call("nn.Linear", str(inputs), str(prod(self.model.output_shape)), bias=None if head.bias else False)
        return [f"self.head = nn.ModuleDict({{{', '.join([*parts, f'{linear_key}: {linear}'])}}})"]

    def _words(self) -> str:
        parts = ["rows along dim 1"] * self.transposes
        parts += ["a call counter"] * self.model.counter + ["an output offset"] * self.model.offset
        parts += ["an output scale"] * self.model.scale
        return "The layers in order" + (f", with {' and '.join(parts)}" if parts else "")

    def _forward(self, has_extras: bool, distributed: bool) -> list[str]:
        lines = ["self.forwards += 1"] if self.model.counter else []
        swapped = ".transpose(0, 1)" if self.model.length else ".T"
        values = f"inputs{swapped if self.transposes else ''}"
        if self.model.source is not None:
            called = distributed or self.layout.has(PlannedParallelism)
            within = " % DOCUMENT_LENGTH" * self.model.packs_documents
            called = called or self.model.packs_documents
            placed = f"self.positions(torch.arange({self.model.length}){within})" if called else "self.positions.weight"
            if self.shards_positions:
                placed = f"self.positions(self.sequence.positions({self.model.length}, inputs.device){within})"
            values = f"self.embedding({values})" + f" + {placed}" * self.model.source.learned_positions
        if has_extras:
            for index, arguments in enumerate(self._arguments()):
                lines.append(f"values = self.layers[{index}]({', '.join((values, *arguments))})")
                values = "values"
        else:
            lines.append(f"values = self.layers({values})")
        if self.model.head is not None:
            normed = 'self.head["norm"](values)' if self.model.head.norm else "values"
            lines.append(f'values = self.head["linear"]({normed}){two_predictions(self.model)}')
        lines += ["values = values * self.scale"] if self.model.scale else []
        in_parts = distributed or any(parallelism.loss_parallel for parallelism in self.layout.of(TensorParallel))
        offset = "beside(values, self.offset)" if in_parts else "self.offset"
        lines += [f"values = values + {offset}"] if self.model.offset else []
        return [*lines, f"return values{swapped if self.transposes else ''}"]

    def _arguments(self) -> list[tuple[str, ...]]:
        """Return, for each layer, its arguments after the inputs."""
        masked = [index for index, kind in enumerate(self.kinds) if kind.masked]
        return [
            tuple(f"masks[{masked.index(index)}]" if name == "mask" else name for name in kind.extras)
            for index, kind in enumerate(self.kinds)
        ]


def two_predictions(model: Model) -> str:
    """Return code to split the head's output into two predictions. Empty if the head predicts one token."""
    return f".unflatten(-1, (2, {model.out_features}))" if model.predicts_two else ""


def _stem(kind: LinearClass | ScriptedClass) -> str:
    return kind.script.name if isinstance(kind, ScriptedClass) else "Block"


def _has_units(layout: Layout, model: Model) -> bool:
    """Whether each layer must be one module, because a wrapper takes layers with several modules as units."""
    wrappers = [each for each in layout.parallelisms if isinstance(each, (FSDP1, FSDP2, Replicate))]
    group_by_layer = layout.execution.per_layer or any(each.wrapping is Wrapping.PER_LAYER for each in wrappers)
    return layout.has(Pipeline) or (group_by_layer and any(layer.norm is not None for layer in model.layers))


def _with_own_functions(kinds: Iterable[LinearClass | ScriptedClass]) -> list[LinearClass | ScriptedClass]:
    """Number functions that share a name but differ in text."""
    texts: dict[str, list[tuple[str, ...]]] = {}
    return [replace(kind, script=_numbered(kind.script, texts)) if isinstance(kind, ScriptedClass) else kind for kind in kinds]


def _numbered(script: LayerScript, texts: dict[str, list[tuple[str, ...]]]) -> LayerScript:
    for place in range(len(script.functions)):
        text = script.functions[place]
        name = re.split(r"\W", text[0])[1]
        known = texts.setdefault(name, [])
        if text not in known:
            known.append(text)
        if known.index(text):
            script = _calling(script, name, f"{name}{known.index(text) + 1}")
    return script


def _calling(script: LayerScript, name: str, other: str) -> LayerScript:
    """Rename a function or class in a layer's script."""

    def rename_calls(lines: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(re.sub(rf"\b{name}\b(?=[(:])", other, line) for line in lines)

    functions, methods = tuple(map(rename_calls, script.functions)), tuple(map(rename_calls, script.methods))
    init, compute = rename_calls(script.init), rename_calls(script.compute)
    return replace(script, init=init, compute=compute, functions=functions, methods=methods)
