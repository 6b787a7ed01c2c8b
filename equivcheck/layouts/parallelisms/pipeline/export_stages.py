"""Writes the stages of a pipeline, and the schedule that runs them, into a script."""

from __future__ import annotations

from equivcheck.layouts.base.plan.rules import inputs_of
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.form import two_predictions
from equivcheck.layouts.base.script.mesh import submesh_of
from equivcheck.layouts.base.script.shards import placement_code
from equivcheck.layouts.base.script.text import block, call, indent_lines
from equivcheck.layouts.parallelisms.pipeline.export_chunks import has_equal_chunks
from equivcheck.layouts.parallelisms.pipeline.export_steps import define_loss, group_code, rank_code, rows_on_rank
from equivcheck.layouts.parallelisms.pipeline.schedules import SCHEDULES
from equivcheck.layouts.parallelisms.pipeline.stages import trained_layers
from equivcheck.scenario import ContextParallel, Model, Pipeline, PlannedParallelism, TensorParallel
from equivcheck.scenario.mesh import CP, TP


def counting_stage(model: Model) -> list[str]:
    """Return the class for stages of models with router biases or load-balancing losses. Empty for other models."""
    counted = ["count_choices(self.submod)"] * model.has_router_bias
    counted += ["Balanced.kept = Balanced.kept + Balanced.last"] * model.balances
    if not counted:
        return []
    words = ["chosen experts"] * model.has_router_bias + ["load-balancing losses"] * model.balances
    recorded = " and ".join(words)
    body = ["outputs = super().forward_one_chunk(*args, **kwargs)", *counted, "return outputs"]
    return [
        "class CountingStage(PipelineStage):",
        f'    """Stage that records {recorded} once per chunk, not when it infers shapes or recomputes."""',
        "",
        *indent_lines(block("def forward_one_chunk(self, *args, **kwargs):", body)),
    ]


def stage_class(draft: Draft) -> list[str]:
    """Write the class for stages that take extra inputs, or that end with more than a layer."""
    extras, model = draft.form.extras, draft.scenario.training.model
    made = [
        "super().__init__()",
        "self.indices = indices",
        "self.layers = nn.ModuleList(model.layers[index] for index in indices)",
    ]
    given = {"masks": '[masks[f"mask_{number}"] for number in range(len(masks))]', "step": "self.step"}
    body = [
        *_embedding_lines(draft),
        *([f"extra = extras({', '.join(given[name] for name in extras)})"] if extras else []),
        "for index, layer in zip(self.indices, self.layers, strict=True):",
        "    values = layer(values, *extra[index])" if extras else "    values = layer(values)",
    ]
    if draft.scenario.layout.has(ContextParallel) and model.source is not None and model.source.learned_positions:
        made.append("self.sequence = model.sequence")
    made += [f"self.{name} = model.{name} if indices == STAGES[0] else None" for name in _embedded_by(model)]
    made += ["self.head = model.head if indices == STAGES[-1] else None"] * (model.head is not None)
    if model.scale:
        made.append("self.scale = model.scale if indices == STAGES[-1] else None")
    if model.offset:
        made.append('self.register_buffer("offset", model.offset if indices == STAGES[-1] else None)')
    if model.head is not None:
        normed = 'self.head["norm"](values)' if model.head.norm else "values"
        body += ["if self.head is not None:", f'    values = self.head["linear"]({normed}){two_predictions(model)}']
    if model.scale or model.offset:
        values = "values" + " * self.scale" * model.scale + " + self.offset" * model.offset
        body.append(f"return {values} if self.indices == STAGES[-1] else values")
    else:
        body.append("return values")
    if extras:
        taken = ", ".join(f"({''.join(f'{name}, ' for name in each)})" for each in draft.form.arguments)
        text = '"""Further arguments for each layer, after its inputs."""'
        draft.definitions.append(block(f"def extras({', '.join(extras)}):", [text, f"return [{taken}]".replace(", )", ",)")]))
    return [
        "class Stage(nn.Module):",
        '    """Consecutive layers of a model."""',
        "",
        *(["    step = 0  # no argument: before torch 2.13, schedules pass tensors by default", ""] if "step" in extras else []),
        *indent_lines(block("def __init__(self, model: nn.Module, indices: range) -> None:", made)),
        "",
        *indent_lines(block(f"def forward(self, values{', **masks' if 'masks' in extras else ''}):", body)),
    ]


def _embedded_by(model: Model) -> tuple[str, ...]:
    """Return the embedding modules by name."""
    if model.source is None:
        return ()
    return ("embedding", "positions") if model.source.learned_positions else ("embedding",)


def _embedding_lines(draft: Draft) -> list[str]:
    model = draft.scenario.training.model
    if model.source is None:
        return []
    within = " % DOCUMENT_LENGTH" if model.packs_documents else ""
    # Tensor parallelism changes what this module returns, not its weight.
    is_called = model.packs_documents or draft.scenario.layout.has(PlannedParallelism)
    placed = f"(torch.arange({model.length}){within})" if is_called else ".weight"
    if draft.scenario.layout.has(ContextParallel):
        placed = f"(self.sequence.positions({model.length}, values.device){within})"
    positions = f" + self.positions{placed}" * model.source.learned_positions
    return ["if self.embedding is not None:", f"    values = self.embedding(values){positions}"]


def build_stages(draft: Draft, parallelism: Pipeline, ranks: int, spans: tuple[range, ...]) -> None:
    """Build this rank's stages and schedule, and replace all other layers by identities."""
    last = ranks * parallelism.stages_per_rank - 1
    rows, rank = tuple(sorted(set(rows_on_rank(draft)))), rank_code(draft)
    if parallelism.stages_per_rank == 1:
        numbers = f"({rank},)"
    elif parallelism.schedule.is_v:
        numbers = f"({rank}, {last} - {rank})"
    else:
        numbers = f"range({rank}, {last + 1}, {ranks})"
    stage = _stage(draft, parallelism, last + 1, spans)
    made = "stages[0]" if parallelism.schedule.is_single else "stages"
    scale = str(parallelism.scale_grads)
    built = call(
        SCHEDULES[parallelism.schedule],
        made,
        str(parallelism.num_chunks),
        loss_fn=define_loss(draft, parallelism, rows),
        scale_grads=scale,
    )
    pipe = [f"stages = [{stage} for number in numbers]"]
    if draft.has_parts:
        pipe = [f"stages = [{stage} for number, part in zip(numbers, parts, strict=True)]"]
    if len(rows) == 1:
        pipe = [line.replace("rows // ", f"{rows[0]} // ") for line in pipe] + [f"pipe = {built}"]
    else:
        pipe = ["pipes = {}", *block(f"for rows in {rows}:", [*pipe, f"pipes[rows] = {built}"])]
    parts = [f"parts = [{_layers(draft)} for number in numbers]"] * draft.has_parts
    draft.add(LoopPosition.AFTER_OPTIMIZER, *(pipe if draft.has_parts else []))
    draft.add(
        LoopPosition.WRAP,
        f"numbers = {numbers}",
        *(parts or pipe),
        f"for index in range({len(draft.form.layers)}):",
        "    if not any(index in STAGES[number] for number in numbers):",
        f"        {draft.form.stack}[index] = nn.Identity()",
    )
    for name in _embedded_by(draft.scenario.training.model):
        draft.add(LoopPosition.WRAP, "if 0 not in numbers:", f"    model.{name} = None")
    if draft.scenario.training.model.head is not None:
        draft.add(LoopPosition.WRAP, f"if {last} not in numbers:", "    model.head = None")
    if draft.scenario.training.model.scale:
        draft.add(LoopPosition.WRAP, f"if {last} not in numbers:", '    model.register_parameter("scale", None)')


def _stage(draft: Draft, parallelism: Pipeline, num_stages: int, spans: tuple[range, ...]) -> str:
    """Return code for one stage."""
    layers = "part" if draft.has_parts else _layers(draft)
    shapes = {}
    if parallelism.static_shapes:
        if draft.scenario.training.model.predicts_two:
            raise refuse(
                "Head.predicts_two with Pipeline.static_shapes",
                "scripts declare shapes with one prediction for each token only",
            )
        _define_shapes(draft, spans)
        rows = f"rows // {parallelism.num_chunks}" if has_equal_chunks(draft) else f"-(-rows // {parallelism.num_chunks})"
        given = f"{rows}, len(ranks.own)" if draft.scenario.layout.mesh.size(CP) > 1 else rows
        shapes = {"input_args": f"chunk({given}, *SHAPES[number])", "output_args": f"chunk({given}, *SHAPES[number + 1])"}
    group = group_code(draft, parallelism)
    if parallelism.sends_dtensors:
        shapes["get_mesh"] = f"lambda names, layout: {submesh_of(draft, TP)}"
    counting = counting_stage(draft.scenario.training.model)
    if counting and counting not in draft.definitions:
        draft.definitions.append(counting)
    kind = "CountingStage" if counting else "PipelineStage"
    return call(kind, layers, "number", str(num_stages), 'torch.device("cpu")', group=group, **shapes)


def _layers(draft: Draft) -> str:
    """Code for the module with a stage's layers."""
    is_sequence = draft.form.stack == "model"
    layers = "model[STAGES[number].start : STAGES[number].stop]" if is_sequence else "Stage(model, STAGES[number])"
    if draft.scenario.training.model.balances:
        layers = f"Balanced({layers})"
    return f"Placed({layers}, {submesh_of(draft, TP)}, SENT[number])" if _sends_dtensors(draft) else layers


def _sends_dtensors(draft: Draft) -> bool:
    return any(pipeline.sends_dtensors for pipeline in draft.scenario.layout.of(Pipeline))


def define_placed(draft: Draft, spans: tuple[range, ...]) -> None:
    """Define a module around a stage that takes and returns DTensors."""
    (plan,) = draft.scenario.layout.of(TensorParallel)
    inputs = inputs_of(draft.scenario.training.model, plan)
    sent = ", ".join([*(placement_code(draft, inputs[span.stop]) for span in spans[:-1]), "None"])
    used = (name for name in ("Replicate", "Shard") if f"{name}(" in sent)
    draft.need("torch.distributed.device_mesh", "DeviceMesh")
    draft.need("torch.distributed.tensor", "DTensor", "Placement", *used)
    draft.definitions.append([f"SENT = [{sent}]  # placement of each stage's output"])
    made = ["super().__init__()", "self.stage, self.mesh, self.sent = stage, mesh, sent"]
    body = [
        "values = self.stage(values.to_local() if isinstance(values, DTensor) else values, **masks)",
        "return values if self.sent is None else DTensor.from_local(values, self.mesh, [self.sent], run_check=False)",
    ]
    draft.definitions.append(
        [
            "class Placed(nn.Module):",
            '    """Stage that takes and returns DTensors."""',
            "",
            *indent_lines(block("def __init__(self, stage: nn.Module, mesh: DeviceMesh, sent: Placement | None) -> None:", made)),
            "",
            *indent_lines(block("def forward(self, values, **masks):", body)),
        ]
    )


def _define_shapes(draft: Draft, spans: tuple[range, ...]) -> None:
    model = draft.scenario.training.model
    trained, embeds = trained_layers(model), model.source is not None and not model.source.frozen
    learns = embeds or any(trained) or model.scale or model.head is not None
    fed = None if model.source is not None else model.features
    between = [(model.in_features(span.start), embeds or any(trained[: span.start])) for span in spans[1:]]
    words = "features" if model.source is None else "features (None for tokens)"
    shapes = [(fed, False), *between, (model.out_features, learns)]
    draft.definitions.append([f"SHAPES = {shapes}  # between stages: {words}, and whether they need a gradient"])
    is_sharded = draft.scenario.layout.mesh.size(CP) > 1
    positions = "" if model.length is None else "positions, " if is_sharded else f"{model.length}, "
    tokens = block("if features is None:", [f"return torch.zeros(rows, {positions}dtype=torch.int64)"])
    draft.definitions.append(
        [
            f"def chunk(rows: int, {'positions: int, ' * is_sharded}features: int{' | None' * (model.source is not None)}, "
            "needs_gradient: bool) -> torch.Tensor:",
            '    """Example of the tensor that a stage sends or receives."""',
            *indent_lines(tokens if model.source is not None else []),
            f"    return torch.empty(rows, {positions}features, requires_grad=needs_gradient)",
        ]
    )
