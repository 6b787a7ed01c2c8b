"""The script's train loop: one function for both runs, with conditions around lines for the parallel run."""

from __future__ import annotations

from equivcheck.layouts.base.limits.repairs import has_frozen
from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.numbers import Numbers, initial_lines
from equivcheck.layouts.base.script.optimizer import optimizer_lines
from equivcheck.layouts.base.script.text import block, call, indent_lines
from equivcheck.scenario import ClipNorm, ClipValue, CrossEntropy, NormType, Training, ZeroGrad
from equivcheck.training.labels import IGNORED


def train_lines(draft: Draft) -> list[str]:
    """Return the script's function ``train``, as lines."""
    assigned = "model" if draft.module == "model" else "model = module"
    body = [
        *([f"torch.manual_seed({draft.scenario.training.seed})"] if draft.numbers is Numbers.DRAWN else []),
        f"{assigned} = {draft.form.expression}",
        *ties(draft),
        *initial_lines(draft.scenario.training, draft.numbers),
        *draft.before_wrap,
        *block("if parallel:", draft.lines[LoopPosition.WRAP]),
        *draft.after_wrap,
        *optimizer_lines(draft),
        "left = {}",
        *block(f"for step, {_batches(draft)} in enumerate(BATCHES):", _step(draft)),
        "return left",
    ]
    what = '"""Train on one device or in parallel, and return the tensors of every step."""'
    return ["def train(parallel: bool) -> dict[str, torch.Tensor | None]:", *indent_lines([what, *body])]


def ties(draft: Draft) -> list[str]:
    """Return lines to make layers share weights."""
    paths, model = draft.form.paths, draft.scenario.training.model
    shared = {index: layer.shares for index, layer in enumerate(model.layers) if layer.shares is not None}
    pairs = [(paths[f"layers.{own}.linear"], paths[f"layers.{other}.linear"]) for own, other in shared.items()]
    pairs += [("head.linear", "embedding")] if model.head is not None and model.head.tied else []
    return [f'model.get_submodule("{own}").weight = model.get_submodule("{other}").weight' for own, other in pairs]


def has_several_microbatches(draft: Draft) -> bool:
    """Whether a step has more than one microbatch."""
    return len(draft.scenario.training.data.microbatches) > 1


def _batches(draft: Draft) -> str:
    if has_several_microbatches(draft):
        return "microbatches"
    return f"({_unpacked(draft)})" if draft.numbers is Numbers.DRAWN else "batch"


def _unpacked(draft: Draft) -> str:
    return "inputs, targets" + ", *masks" * ("masks" in draft.form.extras)


def _step(draft: Draft) -> list[str]:
    training = draft.scenario.training
    averaging = _averaging(draft) if draft.averages_loss else []
    in_backward = draft.scenario.layout.execution.optimizer_in_backward
    return [
        f"optimizer.zero_grad({'' if training.zero_grad is ZeroGrad.NONE else 'set_to_none=False'})",
        *_microbatches(draft),
        *draft.after_backward,
        *block("if parallel:", [*averaging, *draft.lines[LoopPosition.BEFORE_READING]]),
        *_kept_loss(draft),
        *reading(draft, "gradient", "parameter.grad"),
        *_clipping(draft),
        *(block("if not parallel:", ["optimizer.step()"]) if in_backward else ["optimizer.step()"]),
        *(["schedule.step()"] if training.schedule is not None else []),
        *reading(draft, "parameter", "parameter"),
    ]


def _averaging(draft: Draft) -> list[str]:
    if not draft.loss_axes:
        return ["dist.all_reduce(total)", "total /= dist.get_world_size()"]
    sums = [f'dist.all_reduce(total, group=mesh.get_group("{axis}"))' for axis in draft.loss_axes]
    return [*sums, f"total /= {draft.scenario.layout.mesh.size(*draft.loss_axes)}"]


def _kept_loss(draft: Draft) -> list[str]:
    kept = f'left[f"step {{step}} loss"] = {"full(total)" if draft.has_dtensors and not draft.averages_loss else "total"}'
    return block(f"if not parallel or dist.get_rank() == {draft.loss_rank}:", [kept]) if draft.may_lack else [kept]


def _microbatches(draft: Draft) -> list[str]:
    if not has_several_microbatches(draft):
        return [*_microbatch(draft), *([] if draft.computes else ["total = loss.detach()"])]
    batches = "enumerate(microbatches)" if draft.needs_number else "microbatches"
    batch = f"({_unpacked(draft)})" if draft.numbers is Numbers.DRAWN and not _counts_rows(draft) else "batch"
    variables = f"number, {batch}" if draft.needs_number else batch if batch == "batch" else _unpacked(draft)
    lines = [*_microbatch(draft), *([] if draft.computes else ["total = total + loss.detach()"])]
    return ["total = torch.zeros(())", *block(f"for {variables} in {batches}:", lines)]


def _counts_rows(draft: Draft) -> bool:
    """Whether unequal microbatches are weighted by their rows."""
    training = draft.scenario.training
    return (training.loss.is_mean or training.model.balances) and len(set(training.data.microbatches)) > 1


def _microbatch(draft: Draft) -> list[str]:
    lines = []
    if draft.numbers is Numbers.EXACT:
        lines.append(f"{_unpacked(draft)} = map(torch.tensor, batch)")
    elif has_several_microbatches(draft) and _counts_rows(draft):
        lines.append(f"{_unpacked(draft)} = batch")
    lines += block("if parallel:", draft.lines[LoopPosition.TAKE])
    if draft.computes:
        return [*lines, *block("if parallel:", draft.computes), *block("else:", single_device_lines(draft))]
    backward = _backward(draft)
    contexts = ", ".join(filter(None, (draft.around_loss, draft.context)))
    return [*lines, *(block(f"with {contexts}:", backward) if contexts else backward)]


def single_device_lines(draft: Draft) -> list[str]:
    """Return lines for forward and backward on one device.

    A script needs them if its ranks run a different forward or backward.
    """
    return [*_backward(draft), "total = total + loss.detach()" if has_several_microbatches(draft) else "total = loss.detach()"]


def _backward(draft: Draft) -> list[str]:
    outputs = call(draft.module, "inputs", *draft.form.extras)
    lines = [f"loss = {loss_of(draft, outputs)}{share(draft)}"]
    scale = list(draft.lines[LoopPosition.SCALE])
    if draft.loss_scale > 1 and not draft.scenario.training.loss.is_mean:
        scale.insert(0, f"loss = loss * {draft.loss_scale}  # ranks average their gradients")
    backward = ["loss.backward()"]
    if draft.gradient_scale:
        backward = [f"weight = {draft.gradient_scale} if parallel else 1.0", "(loss * weight).backward()"]
    added = [f"loss = loss + {draft.added}"] if draft.added else []
    counted = ["count_choices(model)"] * draft.counts_choices
    return [*lines, *counted, *block("if parallel:", scale), *added, *backward]


def loss_of(draft: Draft, outputs: str) -> str:
    """Return code for the loss between the outputs and ``targets``. `outputs` is an expression."""
    loss = draft.scenario.training.loss
    if isinstance(loss, CrossEntropy):
        return _label_loss(draft, loss, outputs)
    if loss.is_linear:
        return f"({outputs} - targets).{'mean' if loss.is_mean else 'sum'}()"
    draft.need("torch.nn.functional", "mse_loss")
    return call("mse_loss", outputs, "targets", reduction=None if loss.is_mean else '"sum"')


def _label_loss(draft: Draft, loss: CrossEntropy, outputs: str) -> str:
    """Define ``label_loss`` and return a call to it, divided by the step's label count unless the loss is summed."""
    draft.need("torch.nn", "functional")
    model = draft.scenario.training.model
    classes, weighted = model.out_features, loss.weighs_labels or model.predicts_two
    options = {
        "weight": f"torch.linspace(0.5, 1.5, {classes})" if loss.class_weights else None,
        "reduction": '"sum"',
        "label_smoothing": repr(loss.label_smoothing) if loss.label_smoothing else None,
    }
    counted = f"(labels != {IGNORED})"
    if weighted:
        counted, options["reduction"] = f"{counted} * weights", '"none"'
    computed = call("functional.cross_entropy", "logits", "labels", **options)
    lines = [f"loss = ({computed} * weights).sum()" if weighted else f"loss = {computed}"]
    if loss.z_loss:
        lines.append(f"loss = loss + {loss.z_loss} * (logits.logsumexp(-1).square() * {counted}).sum()")
    words = '"""Sum the loss over all labels that are not ignored."""'
    flat = "logits, labels = outputs.flatten(0, -2), targets.flatten()"
    if weighted:
        flat = "logits, labels, weights = outputs.flatten(0, -2), targets[..., 0].flatten().long(), targets[..., 1].flatten()"
    function = block("def label_loss(outputs, targets):", [words, flat, *lines, "return loss"])
    if function not in draft.definitions:
        draft.definitions.append(function)
    return f"label_loss({outputs}, targets){'' if loss.summed else ' / COUNTED[step]'}"


def share(draft: Draft) -> str:
    """Return code to multiply a microbatch's mean loss by the microbatch's share of the step's rows.

    Empty if the loss is a sum, or if a step has one microbatch.
    """
    return part_of_step(draft) if draft.scenario.training.loss.is_mean else ""


def part_of_step(draft: Draft) -> str:
    """Return code to multiply a mean over one microbatch by the microbatch's share of the step's rows.

    Empty if a step has one microbatch.
    """
    training = draft.scenario.training
    if not has_several_microbatches(draft):
        return ""
    if len(set(training.data.microbatches)) == 1:
        return " / len(microbatches)" if training.has_trailing_window else f" / {len(training.data.microbatches)}"
    rows = "batch[0][0]" if training.data.batch_dim else "batch[0]"
    all_rows = str(training.data.batch)
    if training.has_trailing_window:
        all_rows = f"sum(len({rows.replace('batch', 'each')}) for each in microbatches)"
    return f" * (len({rows}) / {all_rows})"


def full_copy(draft: Draft, tensor: str) -> str:
    """Return code to copy a tensor in full. `tensor` is an expression for the tensor."""
    return (
        f"full({tensor})" if draft.has_dtensors or may_lack_gradients(draft.scenario.training) else f"{tensor}.detach().clone()"
    )


def may_lack_gradients(training: Training) -> bool:
    """Whether some parameter may have no gradient (None) after backward."""
    return has_frozen(training.model) or any(layer.auxiliary is not None for layer in training.model.layers)


def reading(draft: Draft, label: str, attribute: str) -> list[str]:
    """Return lines to save one full tensor for each parameter, such as its gradient.

    `attribute` is an expression for the tensor. `label` says in the script's results which tensor it is.
    """
    if draft.reading:
        return [line.format(label=label, attribute=attribute) for line in draft.reading]
    variables, everything = draft.names
    kept = f'left[f"step {{step}} {label} {{name}}"] = {full_copy(draft, attribute)}'
    return block(f"for {variables} in {everything}:", [kept])


def _clipping(draft: Draft) -> list[str]:
    clipping = draft.scenario.training.clipping
    if clipping is None:
        return []
    if isinstance(clipping, ClipValue):
        in_parallel, alone = draft.clip_value, f"nn.utils.clip_grad_value_({draft.parameters}, {clipping.clip_value!r})"
        kept = []
    else:
        in_parallel = f"norm = {draft.clip_norm}" if draft.clip_norm else ""
        alone = f"norm = nn.utils.clip_grad_norm_({draft.parameters}, {norm_arguments(clipping)})"
        kept = [f'left[f"step {{step}} norm"] = {"full(norm)" if draft.has_dtensors else "norm.detach().clone()"}']
    lines = ["if parallel:", f"    {in_parallel}", "else:", f"    {alone}"] if in_parallel else [alone]
    return [*lines, *kept, *reading(draft, "clipped gradient", "parameter.grad")]


def order_of(clipping: ClipNorm) -> str:
    """Return code for the clipping norm's order p."""
    return "torch.inf" if clipping.norm_type is NormType.INF else f"{clipping.norm_type.value}.0"


def norm_arguments(clipping: ClipNorm) -> str:
    """Return code for the arguments of `clip_grad_norm_`: the maximum norm, and the norm type unless it is the default."""
    kind = {NormType.ONE: ", norm_type=1.0", NormType.INF: ", norm_type=torch.inf"}.get(clipping.norm_type, "")
    return f"{clipping.max_norm!r}{kind}"
