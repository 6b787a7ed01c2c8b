"""Searches why an optimizer differs on ranks: a mistake that, made on one device, gives the values on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from equivcheck.oracle.verdict.verdict import Outcome
from equivcheck.user.optimizer_check.altered import Alteration, Altered, set_weight_decay
from equivcheck.user.optimizer_check.cases import OptimizerCase, Placed
from equivcheck.user.task import Task
from equivcheck.user.verdict import UserVerdict
from equivcheck.worlds.trace.differences import Difference, Divergence, Phase

CheckTask = Callable[[Task], UserVerdict]
"""Checks the same ranks against another training on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A possible mistake of an optimizer on ranks."""

    words: str
    """Clause for the verdict."""
    alteration: Alteration
    """The mistake, as a change to the optimizer on one device."""


def cause_of(task: Task, case: OptimizerCase, verdict: UserVerdict, check: CheckTask) -> str:
    """Return, in a sentence, the mistakes that reproduce all values on the ranks; empty if none does.

    Several mistakes may give the same values: with SGD, two updates equal one update with doubled gradients.
    """
    first = verdict.divergence
    if first is None:
        return ""
    if first.difference is Difference.RANKS_DISAGREE:
        return f"ranks have different values of `{first.tensor}` after the update"
    found = [mistake.words for mistake in _mistakes(task, case, first) if _is_reproduced(task, mistake.alteration, check)]
    if found:
        return ", or ".join(found)
    scaled = _scaled_update(task, case, first)
    return scaled.words if scaled is not None and _is_reproduced(task, scaled.alteration, check) else ""


def _is_reproduced(task: Task, alteration: Alteration, check: CheckTask) -> bool:
    try:
        return check(replace(task, optimizer=_reference(task.optimizer, alteration))).outcome is Outcome.EQUIVALENT
    except Exception:  # the user's optimizer may refuse altered parameters
        return False


def _reference(build: Callable[..., Any], alteration: Alteration) -> Callable[..., Any]:
    def build_altered(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return Altered(named_parameters, build, alteration)

    return build_altered


def _mistakes(task: Task, case: OptimizerCase, first: Divergence) -> Iterator[Mistake]:
    names = dict(case.shapes)
    vectors = frozenset(name for name, shape in names.items() if len(shape) < 2)
    tensor = first.tensor.rpartition("/")[0] if first.phase is Phase.STATE else first.tensor
    if case.placed is not Placed.REPLICATED:
        dim = 1 if case.placed is Placed.DIM_1 else 0
        for name, size in task.mesh:
            words = f"each rank optimizes its shard along {name} as if it were the full parameter"
            yield Mistake(words=words, alteration=Alteration(num_shards=size, shard_dim=dim))
    if case.saved_after is not None:
        words = "the optimizer's state is lost when it is loaded"
        yield Mistake(words=words, alteration=Alteration(loses_state_after=case.saved_after))
    yield Mistake(words=f"`{tensor}` is not updated", alteration=Alteration(skips=frozenset({tensor})))
    for words, skips in (("vectors are", vectors), ("matrices are", frozenset(names) - vectors)):
        if skips and len(skips) < len(names):
            yield Mistake(words=f"{words} not updated", alteration=Alteration(skips=skips))
    yield Mistake(words="each step updates twice", alteration=Alteration(times=2))
    for words, factor in (("multiplied", float(task.num_ranks)), ("divided", 1.0 / task.num_ranks)):
        text = f"gradients are {words} by {task.num_ranks}, the number of ranks"
        yield Mistake(words=text, alteration=Alteration(gradient_factor=factor))
    for words, change in (("all parameters have", set_weight_decay), ("no parameter has", partial(set_weight_decay, value=0.0))):
        yield Mistake(words=f"{words} weight decay", alteration=Alteration(changes_groups=change))
    fused = {name: name.replace("qkv", "linear") for name in names if "qkv" in name}
    if fused:
        yield Mistake(words=f"`{next(iter(fused))}` is optimized as one matrix", alteration=Alteration(renamed=fused))


def _scaled_update(task: Task, case: OptimizerCase, first: Divergence) -> Mistake | None:
    """Return a mistake in which the update of the first differing parameter has another size; None if that is not so."""
    scale = _update_factor(task, case, first)
    if scale is None:
        return None
    words = f"the update of `{first.tensor}` is multiplied by {scale:.6g}"
    return Mistake(words=words, alteration=Alteration(update_factors={first.tensor: scale}))


def _update_factor(task: Task, case: OptimizerCase, first: Divergence) -> float | None:
    """Return the ratio of the first wrong update to the right one, measured at one element. None if it is unknown."""
    if first.phase is not Phase.UPDATE or first.step or first.difference is not Difference.VALUE:
        return None
    named = [*case.model().named_parameters()]
    for name, parameter in named:
        parameter.grad = case.gradients()[0][name]
    undecayed = Alteration(changes_groups=partial(set_weight_decay, value=0.0))
    with torch.no_grad():
        right = float(Altered(named, task.optimizer, undecayed).updates_from(named)[first.tensor][first.index])
    return 1.0 + (float(first.actual) - float(first.expected)) / right if right else None
