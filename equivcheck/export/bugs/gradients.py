"""Gradients that are reduced, kept or zeroed wrongly."""

from __future__ import annotations

from equivcheck.export.bugs.snippet import Snippet, each_gradient
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.mesh import data_rank
from equivcheck.layouts.base.script.text import block, indented


def _reduced_by(draft: Draft, name: str, body: list[str], words: str) -> None:
    if not draft.hooked:
        raise refuse("the mutant", f"{draft.scenario.layout.name} has no hook for the reduction of gradients")
    text = f'"""{words}."""'
    draft.definitions.append(block(f"def {name}(group: dist.ProcessGroup | None, bucket: dist.GradBucket):", [text, *body]))
    # A hook on a composable replica is taken up when that is set up, which is then the last line.
    lines = draft.lines[LoopPosition.WRAP]
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
        draft.add(LoopPosition.BEFORE_READING, "with torch.no_grad():", *indented(each_gradient(draft, line)))

    return plant_factor


def _parameter_left_out(draft: Draft) -> None:
    draft.add(
        LoopPosition.WRAP,
        "left_out = [parameter for parameter in model.parameters() if parameter.requires_grad][-1]",
        "own = []  # its gradients as this rank computes them",
        "left_out.register_hook(lambda gradient: own.append(gradient.clone()))",
    )
    draft.add(LoopPosition.BEFORE_READING, "if own:", "    left_out.grad.copy_(torch.stack(own).sum(0))", "    own.clear()")


def _weights_not_broadcast(draft: Draft) -> None:
    draft.add(
        LoopPosition.AFTER_OPTIMIZER,
        "with torch.no_grad():",
        f"    for parameter in {draft.parameters}:",
        f"        parameter.mul_(1 + 0.25 * ({data_rank(draft)}))  # nobody makes ranks equal again",
    )


def _gradients_not_zeroed(draft: Draft) -> None:
    for arguments in ("", "set_to_none=False"):
        draft.conditions[f"optimizer.zero_grad({arguments})"] = "not parallel"


def _gradients_of_last_step(draft: Draft) -> None:
    draft.add(LoopPosition.AFTER_OPTIMIZER, "kept = {}")
    draft.add(
        LoopPosition.BEFORE_READING,
        *each_gradient(
            draft,
            "now = parameter.grad.clone()",
            "parameter.grad.copy_(kept.get(parameter, now))  # those of the step before",
            "kept[parameter] = now",
        ),
    )


def _zeroed_before_update(draft: Draft) -> None:
    draft.add(LoopPosition.BEFORE_UPDATE, *each_gradient(draft, "parameter.grad.zero_()"))


def _inner_module_called(draft: Draft) -> None:
    if draft.module != "module" or draft.context:
        raise refuse("the mutant", "only where DistributedDataParallel is called, without no_sync")
    draft.add(LoopPosition.WRAP, "module = module.module  # whose call runs no hooks")


SNIPPETS: dict[str, Snippet] = {
    "reduction_missing": _reduction_missing,
    "gradients_summed": _gradients_summed,
    "averaged_twice": _scaled("/= {}", "averaged already"),
    "parameter_left_out": _parameter_left_out,
    "weights_not_broadcast": _weights_not_broadcast,
    "gradients_not_zeroed": _gradients_not_zeroed,
    "gradients_of_last_step": _gradients_of_last_step,
    "zeroed_before_update": _zeroed_before_update,
    "inner_module_called": _inner_module_called,
}
"""By the name of the mutant."""
