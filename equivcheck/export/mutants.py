"""Mutants as lines of a script: what a hand-written training with that bug would have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivcheck.export.draft import Draft, Place
from equivcheck.export.layouts.mesh import data_rank
from equivcheck.export.refusal import CannotExport, refuse
from equivcheck.export.text import block, indented
from equivcheck.layouts.limits import parallelism_of
from equivcheck.mutants.hyperparameters import OptimizerOfAnother
from equivcheck.mutants.mutant import Mutant
from equivcheck.scenario import SPMD, Split, TensorParallel

Snippet = Callable[[Draft], None]


def plant(draft: Draft, mutant: Mutant) -> None:
    """Put a mutant's bug into a draft whose layout has been written; raises `CannotExport` where no lines are known."""
    if isinstance(mutant.plant, OptimizerOfAnother):
        draft.trained = mutant.plant.change(draft.trained)
        return
    snippet = SNIPPETS.get(mutant.name)
    if snippet is None:
        raise CannotExport(f"mutant {mutant.name!r} cannot be exported; allowed: {', '.join(expressible())}")
    snippet(draft)


def expressible() -> tuple[str, ...]:
    """Names of the mutants that a script can have."""
    from equivcheck.mutants.registry import mutants

    return tuple(name for name, found in mutants().items() if name in SNIPPETS or isinstance(found.plant, OptimizerOfAnother))


def _each_gradient(draft: Draft, *lines: str) -> list[str]:
    """Lines for each parameter that has a gradient."""
    inner = block("if parameter.grad is not None:", list(lines))
    return block(f"for parameter in {draft.parameters}:", inner)


def _reduced_by(draft: Draft, name: str, body: list[str], words: str) -> None:
    if not draft.hooked:
        raise refuse("the mutant", f"{draft.scenario.layout.name} has no hook for the reduction of gradients")
    text = f'"""{words}."""'
    draft.definitions.append(block(f"def {name}(group: dist.ProcessGroup | None, bucket: dist.GradBucket):", [text, *body]))
    # A hook on a composable replica is taken up when that is set up, which is then the last line.
    lines = draft.lines[Place.WRAP]
    end = len(lines) - any(line.startswith("replicate.state(") for line in lines)
    lines.insert(end, f"{draft.hooked}.register_comm_hook({draft.group}, {name})")


def _reduction_missing(draft: Draft) -> None:
    lines = ["future = torch.futures.Future()", "future.set_result(bucket.buffer())", "return future"]
    _reduced_by(draft, "keep", lines, "Leave gradients as this rank has them")


def _gradients_summed(draft: Draft) -> None:
    lines = [
        "future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()",
        "return future.then(lambda done: done.value()[0])",
    ]
    _reduced_by(draft, "add_up", lines, "Sum gradients over ranks, and divide by nothing")


def _scaled(factor: str, words: str) -> Snippet:
    def plant_factor(draft: Draft) -> None:
        ranks = draft.scenario.layout.num_data_ranks
        line = f"parameter.grad {factor.format(ranks)}  # {words}"
        draft.add(Place.BEFORE_READING, "with torch.no_grad():", *indented(_each_gradient(draft, line)))

    return plant_factor


def _parameter_left_out(draft: Draft) -> None:
    draft.add(
        Place.WRAP,
        "left_out = [parameter for parameter in model.parameters() if parameter.requires_grad][-1]",
        "own = []  # its gradients as this rank computes them",
        "left_out.register_hook(lambda gradient: own.append(gradient.clone()))",
    )
    draft.add(Place.BEFORE_READING, "if own:", "    left_out.grad.copy_(torch.stack(own).sum(0))", "    own.clear()")


def _share(index: str) -> Snippet:
    def take(draft: Draft) -> None:
        own, count = f"[{data_rank(draft)}]", draft.scenario.layout.num_data_ranks
        if any(isinstance(parallelism, SPMD) for parallelism in draft.scenario.layout.parallelisms):
            raise refuse("the mutant", "under spmd rows are distributed by one call")
        other = f"[{index.format(rank=data_rank(draft), last=count - 2)}]"
        draft.lines[Place.TAKE] = [line.replace(own, other) for line in draft.lines[Place.TAKE]]

    return take


def _shuffled_apart(draft: Draft) -> None:
    rank, dim = data_rank(draft), draft.scenario.training.data.batch_dim
    lines = [f"inputs, targets = (values.roll({rank}, {dim}) for values in (inputs, targets))  # each rank otherwise"]
    if "masks" in draft.form.extras:
        lines.append(f"masks = [mask.roll({rank}, 0) for mask in masks]")
    draft.lines[Place.TAKE][:0] = lines


def _weights_not_broadcast(draft: Draft) -> None:
    draft.add(
        Place.AFTER_OPTIMIZER,
        "with torch.no_grad():",
        f"    for parameter in {draft.parameters}:",
        f"        parameter.mul_(1 + 0.25 * ({data_rank(draft)}))  # nobody makes ranks equal again",
    )


def _gradients_not_zeroed(draft: Draft) -> None:
    draft.alone_only |= {"optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"}


def _gradients_of_last_step(draft: Draft) -> None:
    draft.add(Place.AFTER_OPTIMIZER, "kept = {}")
    draft.add(
        Place.BEFORE_READING,
        *_each_gradient(
            draft,
            "now = parameter.grad.clone()",
            "parameter.grad.copy_(kept.get(parameter, now))  # those of the step before",
            "kept[parameter] = now",
        ),
    )


def _zeroed_before_update(draft: Draft) -> None:
    draft.add(Place.BEFORE_UPDATE, *_each_gradient(draft, "parameter.grad.zero_()"))


def _inner_module_called(draft: Draft) -> None:
    if draft.module != "module" or draft.context:
        raise refuse("the mutant", "only where DistributedDataParallel is called, without no_sync")
    draft.add(Place.WRAP, "module = module.module  # whose call runs no hooks")


def _rate_scaled_by_ranks(draft: Draft) -> None:
    training, ranks = draft.trained, draft.scenario.layout.mesh.num_ranks
    draft.trained = replace(training, optimizer=replace(training.optimizer, lr=ranks * training.optimizer.lr))


def _schedule_more_often(times: Callable[[Draft], int]) -> Snippet:
    def step(draft: Draft) -> None:
        if times(draft) > 1:
            draft.add(Place.AFTER_UPDATE, f"for _ in range({times(draft) - 1}):", "    schedule.step()")

    return step


def _schedule_stuck(draft: Draft) -> None:
    draft.alone_only.add("schedule.step()")


def _row_linears(draft: Draft) -> list[tuple[int, str]]:
    """The indices of layers split by rows, each with the names of its linears in the script."""
    scenario = draft.scenario
    plan, layers = parallelism_of(scenario.layout, TensorParallel).plan, scenario.training.model.layers
    found = [(index, "linear") for index, entry in enumerate(plan) if entry.split is Split.ROW]
    found += [(index, "side") for index, _ in found if layers[index].side is not None]
    return [(index, draft.form.paths[f"layers.{index}.{owner}"]) for index, owner in found]


def _row_output_averaged(draft: Draft) -> None:
    for _, path in _row_linears(draft):
        halve = "lambda _, inputs: inputs[0] / inputs[0].device_mesh.size()"
        draft.add(Place.WRAP, f'model.get_submodule("{path}").register_forward_pre_hook({halve})')


def _row_bias_on_every_rank(draft: Draft) -> None:
    layers = draft.scenario.training.model.layers
    paths = [path for index, path in _row_linears(draft) if layers[index].bias and not path.endswith("side")]
    more = "outputs + (outputs.device_mesh.size() - 1) * linear.bias.detach()"
    for path in paths:
        hook = f"lambda linear, _, outputs: {more}"
        draft.add(Place.WRAP, f'model.get_submodule("{path}").register_forward_hook({hook}, prepend=True)')


def _whole_batch_on_every_rank(draft: Draft) -> None:
    def whole(line: str) -> str:
        for name in ("values", "mask"):
            line = line.replace(f"distribute_tensor({name}, mesh, ", f"DTensor.from_local({name}, mesh, ")
        return line

    draft.lines[Place.TAKE] = [whole(line) for line in draft.lines[Place.TAKE]]


SNIPPETS: dict[str, Snippet] = {
    "reduction_missing": _reduction_missing,
    "gradients_summed": _gradients_summed,
    "averaged_twice": _scaled("/= {}", "averaged already"),
    "parameter_left_out": _parameter_left_out,
    "same_rows_everywhere": _share("0"),
    "last_rows_lost": _share("min({rank}, {last})"),
    "shuffled_apart": _shuffled_apart,
    "weights_not_broadcast": _weights_not_broadcast,
    "gradients_not_zeroed": _gradients_not_zeroed,
    "gradients_of_last_step": _gradients_of_last_step,
    "zeroed_before_update": _zeroed_before_update,
    "inner_module_called": _inner_module_called,
    "rate_scaled_by_ranks": _rate_scaled_by_ranks,
    "schedule_stepped_each_rank": _schedule_more_often(lambda draft: draft.scenario.layout.mesh.num_ranks),
    "schedule_stepped_each_microbatch": _schedule_more_often(lambda draft: len(draft.scenario.training.data.microbatches)),
    "schedule_stuck": _schedule_stuck,
    "row_output_averaged": _row_output_averaged,
    "row_bias_on_every_rank": _row_bias_on_every_rank,
    "whole_batch_on_every_rank": _whole_batch_on_every_rank,
}
"""By the name of the mutant; those that build another optimizer need no lines of their own."""
