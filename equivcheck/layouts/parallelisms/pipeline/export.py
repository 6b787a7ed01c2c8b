"""Writes `torch.distributed.pipelining` into a script."""

from __future__ import annotations

from collections.abc import Sequence

from equivcheck.layouts.base.plan.rules import inputs_of
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.form import two_predictions
from equivcheck.layouts.base.script.loop import has_several_microbatches, loss_of, order_of
from equivcheck.layouts.base.script.mesh import last_number, mesh_of, submesh_of
from equivcheck.layouts.base.script.shards import placement_code
from equivcheck.layouts.base.script.text import block, call, indent_lines
from equivcheck.layouts.parallelisms.pipeline.export_chunks import define_chunks, has_equal_chunks, step_code
from equivcheck.layouts.parallelisms.pipeline.schedules import SCHEDULES
from equivcheck.layouts.parallelisms.pipeline.stages import (
    SharedWeight,
    defers_reduction,
    has_fsdp_stages,
    layers_of_stages,
    trained_layers,
    weights_of_several_ranks,
)
from equivcheck.scenario import (
    DDP,
    FSDP2,
    ClipNorm,
    CrossEntropy,
    LocalDataParallel,
    LocalTensorParallel,
    Model,
    NormType,
    Pipeline,
    PlannedParallelism,
    Replicate,
    TensorParallel,
)
from equivcheck.scenario.mesh import PP, TP


def write(draft: Draft, parallelism: Pipeline) -> None:
    """Let the exported script keep only each rank's stages of its model, and run them by a schedule."""
    layout, training = draft.scenario.layout, draft.scenario.training
    if not all(isinstance(each, WRITTEN) for each in layout.parallelisms):
        raise refuse(
            f"layout {layout.name}",
            "scripts support a pipeline by itself, or with DDP, replicate, fully_shard, local_data_parallel, "
            "local_tensor_parallel or tensor_parallel",
        )
    if any(each.loss_parallel for each in layout.of(TensorParallel)):
        raise refuse("TensorParallel.loss_parallel in a pipeline", "a loss of DTensors takes too much code for a short script")
    if training.model.balances:
        raise refuse("Experts.balance in a pipeline", "the loss that each stage adds to its activations takes too much code")
    ranks = layout.mesh.size(PP)
    draft.has_parts = any(each.reduces_each_module for each in layout.parallelisms)
    draft.need("torch.distributed.pipelining", "PipelineStage")
    draft.need("torch.distributed.pipelining.schedules", SCHEDULES[parallelism.schedule])
    spans = layers_of_stages(parallelism, ranks, len(training.model.layers))
    stages = ", ".join(f"range({span.start}, {span.stop})" for span in spans)
    draft.definitions.append([f"STAGES = [{stages}]  # layers of each"])
    draft.loss_axes = tuple(name for name in layout.mesh.names if name != PP)
    draft.averages_loss, draft.may_lack = bool(draft.loss_axes), True
    draft.loss_rank = layout.mesh.lines(PP)[0][_loss_number(parallelism, ranks)]
    if draft.loss_axes:
        draft.add(LoopPosition.WRAP, f"pipe_rank = {mesh_of(draft, parallelism)}.get_local_rank()")
    if draft.form.stack != "model":
        draft.definitions.append(_stage_class(draft))
    if parallelism.sends_dtensors:
        _define_placed(draft, spans)
    shared = weights_of_several_ranks(training.model, parallelism, ranks)
    if shared and (has_fsdp_stages(layout) or draft.reading or draft.has_dtensors):
        raise refuse(
            f"layout {layout.name} with a weight shared by several ranks",
            "the other parallelism replaces each rank's copy of the weight",
        )
    if shared:
        draft.add(LoopPosition.WRAP, WEIGHTS)
    _build(draft, parallelism, ranks, spans)
    if shared:
        copy_weights(draft, shared)
    if parallelism.presplit:
        define_chunks(draft, parallelism)
    draft.computes = _compute(draft, parallelism, ranks)
    if isinstance(training.clipping, ClipNorm):
        if draft.mixes_tensors:
            raise refuse(
                "clipping by norm in a pipeline with layers outside the plan",
                "on each stage, parameters in the plan and outside it need separate norms, which take too much code for a short "
                "script",
            )
        draft.definitions.append(_clip(draft, training.clipping, "counted" if shared else "parameters"))
        counted = ["[weight for weight in model.parameters() if weight not in uncounted]"] * bool(shared)
        clipped = ["parameters", "neighbours"] if draft.reading else ["list(model.parameters())", *counted]
        draft.clip_norm = call("clip_across_stages", *clipped, group=_group(draft, parallelism))


WRITTEN = (Pipeline, LocalDataParallel, DDP, Replicate, FSDP2, LocalTensorParallel, TensorParallel)
"""Parallelisms supported by scripts together with a pipeline."""


def _loss_number(parallelism: Pipeline, ranks: int) -> int:
    """Return the pipeline rank with the last stage."""
    return 0 if parallelism.schedule.is_v else ranks - 1


def _group(draft: Draft, parallelism: Pipeline) -> str | None:
    """Return an expression for the pipeline's process group; None if the group has all ranks."""
    return f"{mesh_of(draft, parallelism)}.get_group()" if draft.loss_axes else None


def _rank(draft: Draft) -> str:
    """Return an expression for the rank's number in its pipeline."""
    return "pipe_rank" if draft.loss_axes else "dist.get_rank()"


COUNTING_STAGE = (
    "class CountingStage(PipelineStage):",
    '    """Stage that counts the chosen experts of each chunk. Passes that infer shapes or recompute layers do not count."""',
    "",
    "    def forward_one_chunk(self, *args, **kwargs):",
    "        outputs = super().forward_one_chunk(*args, **kwargs)",
    "        count_choices(self.submod)",
    "        return outputs",
)
"""Class for stages whose routers have a bias that is updated once a step."""


def _rows(draft: Draft) -> tuple[int, ...]:
    """Return the rows of each microbatch on one rank."""
    return tuple(rows // draft.scenario.layout.num_data_ranks for rows in draft.scenario.training.data.microbatches)


def _stage_class(draft: Draft) -> list[str]:
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
        *(["    step = 0  # no argument: before torch 2.13, schedules pass only tensors", ""] if "step" in extras else []),
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
    positions = f" + self.positions{placed}" * model.source.learned_positions
    return ["if self.embedding is not None:", f"    values = self.embedding(values){positions}"]


def _build(draft: Draft, parallelism: Pipeline, ranks: int, spans: tuple[range, ...]) -> None:
    """Build this rank's stages and schedule, and replace all other layers by identities."""
    last = ranks * parallelism.stages_per_rank - 1
    rows, rank = tuple(sorted(set(_rows(draft)))), _rank(draft)
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
        loss_fn=_loss_fn(draft, parallelism, rows),
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
        shapes = {"input_args": f"chunk({rows}, *SHAPES[number])", "output_args": f"chunk({rows}, *SHAPES[number + 1])"}
    group = _group(draft, parallelism)
    if parallelism.sends_dtensors:
        shapes["get_mesh"] = f"lambda names, layout: {submesh_of(draft, TP)}"
    if draft.scenario.training.model.has_router_bias and list(COUNTING_STAGE) not in draft.definitions:
        draft.definitions.append(list(COUNTING_STAGE))
    kind = "CountingStage" if draft.scenario.training.model.has_router_bias else "PipelineStage"
    return call(kind, layers, "number", str(num_stages), 'torch.device("cpu")', group=group, **shapes)


def _layers(draft: Draft) -> str:
    """Code for the module with a stage's layers."""
    is_sequence = draft.form.stack == "model"
    layers = "model[STAGES[number].start : STAGES[number].stop]" if is_sequence else "Stage(model, STAGES[number])"
    return f"Placed({layers}, {submesh_of(draft, TP)}, SENT[number])" if _sends_dtensors(draft) else layers


def _sends_dtensors(draft: Draft) -> bool:
    return any(pipeline.sends_dtensors for pipeline in draft.scenario.layout.of(Pipeline))


def _define_placed(draft: Draft, spans: tuple[range, ...]) -> None:
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
    positions = "" if model.length is None else f"{model.length}, "
    tokens = block("if features is None:", [f"return torch.zeros(rows, {positions}dtype=torch.int64)"])
    draft.definitions.append(
        [
            f"def chunk(rows: int, features: int{' | None' * (model.source is not None)}, needs_gradient: bool) -> torch.Tensor:",
            '    """Example of the tensor that a stage sends or receives."""',
            *indent_lines(tokens if model.source is not None else []),
            f"    return torch.empty(rows, {positions}features, requires_grad=needs_gradient)",
        ]
    )


def _loss_fn(draft: Draft, parallelism: Pipeline, rows: tuple[int, ...]) -> str:
    """Define a chunk's loss as its part of the step's loss, and return code for it."""
    training = draft.scenario.training
    loss, arguments = loss_of(draft, "outputs").replace("[step]", "[loss_fn.step]"), "outputs, targets"
    chunks = 1 if parallelism.scale_grads else parallelism.num_chunks
    uneven, batch = training.loss.is_mean and len(rows) > 1, sum(_rows(draft))
    data_ranks = draft.scenario.layout.num_data_ranks
    if parallelism.presplit and training.loss.is_mean:
        scale = f" * {parallelism.num_chunks}" if parallelism.scale_grads and parallelism.num_chunks > 1 else ""
        of = "ROWS[loss_fn.step]" if training.has_trailing_window else str(batch)
        loss, uneven = f"{loss} * len(targets){scale} / {of}", False
    elif uneven:
        loss, arguments = f"{loss} * share", f"{arguments}, share"
        if training.has_trailing_window:
            loss = f"{loss} * {batch} / ROWS[loss_fn.step]"
    elif training.loss.is_mean and training.has_trailing_window:
        loss = f"{loss} * {rows[0]} / {chunks} / ROWS[loss_fn.step]"
    elif training.loss.is_mean and chunks * batch > rows[0]:
        loss = f"{loss} / {chunks * batch // rows[0]}"
    elif not training.loss.is_mean and data_ranks > 1:
        loss = f"{loss} * {data_ranks}"
    if training.loss.is_mean and training.has_trailing_window:
        counts = [training.rows_at(step) // data_ranks for step in range(training.steps)]
        draft.definitions.append([f"ROWS = {counts}  # in each step"])
    text = '"""A chunk\'s share of the step\'s loss."""'
    cut = [] if has_equal_chunks(draft) else ["outputs = outputs[: len(targets)]  # without padding"]
    draft.definitions.append(block(f"def loss_fn({arguments}):", [text, *cut, f"return {loss}"]))
    if not uneven:
        return "loss_fn"
    draft.need("functools", "partial")
    return f"partial(loss_fn, share=rows / {chunks * batch})"


def _compute(draft: Draft, parallelism: Pipeline, ranks: int) -> list[str]:
    training = draft.scenario.training
    several_rows = len(set(training.data.microbatches)) > 1
    pipe = f"pipes[len({'targets' if parallelism.presplit else 'inputs'})]" if several_rows else "pipe"
    scale = f" / {parallelism.num_chunks}" if parallelism.scale_grads and parallelism.num_chunks > 1 else ""
    total = f"sum(losses, torch.zeros(())).detach(){scale}"
    first, target = "inputs", "targets"
    if ranks > 1:
        first = f"*([inputs] if {_rank(draft)} == 0 else [])"
        target = f"targets if {_rank(draft)} == {_loss_number(parallelism, ranks)} else None"
    masks = ['**{f"mask_{number}": mask for number, mask in enumerate(masks)}'] if "masks" in draft.form.extras else []
    options = {}
    if defers_reduction(training, draft.scenario.layout):
        draft.needs_number = True
        options["finalize_gradients"] = f"number == {last_number(draft)}"
    run = call(f"{pipe}.step", first, f"target={target}", "losses=losses", *masks, **options)
    if parallelism.presplit:
        run = step_code(
            draft, parallelism, pipe, f"inputs if {_rank(draft)} == 0 else None" if ranks > 1 else "inputs", target, **options
        )
    return [
        "losses = []",
        *(["loss_fn.step = step"] if isinstance(training.loss, CrossEntropy) or training.has_trailing_window else []),
        *(["Stage.step = step"] if "step" in draft.form.extras else []),
        run,
        f"total = total + {total}" if has_several_microbatches(draft) else f"total = {total}",
    ]


def _clip(draft: Draft, clipping: ClipNorm, counted: str) -> list[str]:
    order, group = order_of(clipping), "group" if draft.loss_axes else None
    if clipping.norm_type is NormType.INF:
        across = [call("dist.all_reduce", "norm", op="dist.ReduceOp.MAX", group=group)]
    else:
        across = [f"norm = norm**{order}", call("dist.all_reduce", "norm", group=group), f"norm = norm ** (1 / {order})"]
    norm = f"nn.utils.get_total_norm(gradients, {order})"
    norm = f"full({norm})" if has_fsdp_stages(draft.scenario.layout) or draft.has_dtensors else norm
    taken = f", {counted}: list[nn.Parameter]" * (counted != "parameters") + ", group: dist.ProcessGroup" * (group is not None)
    head = [f"def clip_across_stages(parameters: list[nn.Parameter]{taken}) -> torch.Tensor:"]
    gradients = [f"gradients = [parameter.grad for parameter in {counted} if parameter.grad is not None]"]
    if draft.reading:
        group_types = "neighbours: dist.ProcessGroup, group: dist.ProcessGroup"
        head = [f"def clip_across_stages(parameters: dict[str, nn.Parameter], {group_types}) -> torch.Tensor:"]
        gradients = [
            "gradients = [whole(each.grad, SHARDED.get(name), neighbours) for name, each in parameters.items()]",
            "gradients = [gradient for gradient in gradients if gradient is not None]",
            "parameters = list(parameters.values())",
        ]
    return [
        *head,
        '    """Clip by the norm over the parameters on all ranks, and return it."""',
        *indent_lines(gradients),
        f"    norm = {norm}.to(parameters[0].dtype)",
        *indent_lines(across),
        f"    nn.utils.clip_grads_with_norm_(parameters, {clipping.max_norm!r}, norm)",
        "    return norm",
    ]


WEIGHTS = "weights = [model.get_submodule(owner).weight for owner, _ in SHARED]"
"""Line to collect the shared weights, before ranks remove other stages' layers."""

SUM_GRADIENTS = (
    "for weight, group in copies:",
    "    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad",
    "    dist.all_reduce(weight.grad, group=group)",
)
"""Lines to sum the gradients of shared weights over their copies, after all microbatches."""


def copy_weights(draft: Draft, shared: Sequence[SharedWeight]) -> None:
    """Let the exported script name each copy of a shared weight as in the full model, and sum the copies' gradients."""
    entries = [
        (
            draft.form.paths.get(weight.owner, weight.owner),
            [weight.first_rank, *(rank for rank in weight.ranks if rank != weight.first_rank)],
        )
        for weight in shared
    ]
    draft.definitions.append([f"SHARED = {entries}  # owner of each shared weight, and ranks with a copy"])
    naming = [
        '"""Register a weight under its name in the full model, with modules that do nothing."""',
        'for part in owner.split("."):',
        "    if getattr(module, part, None) is None:",
        "        module.add_module(part, nn.Identity())",
        "    module = getattr(module, part)",
        "module.weight = weight",
    ]
    draft.definitions.append(block("def keep_name(module: nn.Module, owner: str, weight: nn.Parameter) -> None:", naming))
    groups = ["group = dist.new_group(ranks)"]
    if draft.loss_axes:
        lines = list(draft.scenario.layout.mesh.lines(PP))
        draft.definitions.append([f"PIPELINES = {lines}  # global ranks of each"])
        made = "[dist.new_group([pipeline[number] for number in ranks]) for pipeline in PIPELINES]"
        groups = [f"groups = {made}", "group = groups[[dist.get_rank() in pipeline for pipeline in PIPELINES].index(True)]"]
    draft.add(
        LoopPosition.WRAP,
        "copies, uncounted = [], set()",
        "for weight, (owner, ranks) in zip(weights, SHARED, strict=True):",
        *indent_lines(groups),
        f"    if {_rank(draft)} in ranks and weight.requires_grad:",
        "        copies.append((weight, group))",
        f"    if {_rank(draft)} in ranks[1:]:",
        "        keep_name(model, owner, weight)",
        "        uncounted.add(weight)",
    )
    draft.add(LoopPosition.BEFORE_READING, *SUM_GRADIENTS)
