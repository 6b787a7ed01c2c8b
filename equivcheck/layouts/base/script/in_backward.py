"""Writes updates in backward into a script: each parameter gets a hook with an optimizer of its own."""

from __future__ import annotations

from equivcheck.layouts.base.script.draft import Draft, LoopPosition
from equivcheck.layouts.base.script.mesh import last_number
from equivcheck.layouts.base.script.text import block
from equivcheck.scenario import ClipValue


def write_in_backward(draft: Draft) -> None:
    """Let the script's ranks update parameters during the last microbatch's backward."""
    draft.definitions.append(_definition(draft))
    draft.add(LoopPosition.AFTER_OPTIMIZER, 'complete, backward = {}, {"updates": True}')
    draft.add(LoopPosition.AFTER_OPTIMIZER, "update_in_backward(optimizer, complete, backward)")
    if len(draft.scenario.training.data.microbatches) > 1:
        draft.needs_number = True
        draft.add(LoopPosition.TAKE, f'backward["updates"] = number == {last_number(draft)}')
    shown = block("for parameter, gradient in complete.items():", ["parameter.grad = gradient"])
    draft.add(LoopPosition.BEFORE_READING, *shown, "complete.clear()")


def _definition(draft: Draft) -> list[str]:
    clipping = draft.scenario.training.clipping
    clipped = f"nn.utils.clip_grad_value_([parameter], {clipping.clip_value!r})" if isinstance(clipping, ClipValue) else ""
    updated = [
        "complete[parameter] = parameter.grad.detach().clone()",
        *([clipped] if clipped else []),
        'own.param_groups[0]["lr"] = group["lr"]',
        "own.step()",
        "parameter.grad = None",
    ]
    hook = block("def update(parameter):", block('if backward["updates"]:', updated))
    added = [
        'own = type(optimizer)([{**group, "params": [parameter]}])',
        "",
        *hook,
        "",
        "parameter.register_post_accumulate_grad_hook(update)",
    ]
    registered = block("if parameter.requires_grad:", ["add(group, parameter)"])
    body = [
        '"""Give each parameter an optimizer of its own, which updates it when its gradient is complete."""',
        "",
        *block("def add(group, parameter):", added),
        "",
        *block("for group in optimizer.param_groups:", block('for parameter in group["params"]:', registered)),
    ]
    return block("def update_in_backward(optimizer, complete, backward):", body)
