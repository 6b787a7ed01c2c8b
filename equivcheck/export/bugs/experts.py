"""Experts of which a router chooses or weighs otherwise on ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

from equivcheck.export.bugs.snippet import Snippet, flagged
from equivcheck.export.bugs.token_layers import rewritten
from equivcheck.layouts.base.expected_calls.counted_units import AXES
from equivcheck.layouts.base.script.draft import Draft, LoopPosition, refuse
from equivcheck.layouts.base.script.text import block
from equivcheck.layouts.parallelisms.fsdp2.division import averaging_ranks
from equivcheck.scenario import FSDP2, Scenario

_ROUTED = re.compile(r"( *)(flat, chosen, weights = |values = torch\.zeros_like\(normed\))")
"""The first line after a router has given what is chosen and what that weighs."""
_WEIGHTED = r"(gated\d*)\(self\.experts, (normed|flat\[places\]), expert\) \* (weights\[[^]]*\])"
_WEIGHED = r"(gated\d*)\(self\.experts, (normed|flat\[places\]) \* (weights\[[^]]*\]), expert\)"


def _rerouted(*lines: str, where: str = "chosen_by") -> Snippet:
    """Lines after those of a router, in layers that have such a text."""

    def change(written: tuple[str, ...]) -> tuple[str, ...]:
        if not any(where in line for line in written):
            return written
        at, indent = next(((at, found[1]) for at, line in enumerate(written) if (found := _ROUTED.match(line))), (None, ""))
        if at is None:
            return written
        return (*written[:at], *(indent + line for line in block("if self.is_wrong:", list(lines))), *written[at:])

    def plant(draft: Draft) -> None:
        flagged(draft, [change(lines) for lines in draft.form.classes])

    return plant


def _other_side(line: str) -> str:
    """What is weighted after an expert before it, and the other way round."""
    for here, there in (
        (_WEIGHTED, r"\1(self.experts, \2 * \3, expert)"),
        (_WEIGHED, r"\1(self.experts, \2, expert) * \3"),
    ):
        if re.search(here, line):
            return re.sub(here, rf"({there} if self.is_wrong else \g<0>)", line)
    return line


def _reweighed(factor: Callable[[Scenario], int | float]) -> Snippet:
    """The auxiliary loss of ranks times a factor."""

    def plant(draft: Draft) -> None:
        draft.added = f"{_balance(draft)} * ({factor(draft.scenario)!r} if parallel else 1)"

    return plant


def _balance(draft: Draft) -> str:
    if not draft.added:
        raise refuse("the mutant", "the script has no auxiliary loss")
    return draft.added


def _counted_by(groups: str) -> Snippet:
    """Choices counted over other groups of ranks."""

    def plant(draft: Draft) -> None:
        _balance(draft)
        draft.add(LoopPosition.WRAP, f"counting_groups[:] = {groups}")

    return plant


def _counted_along_last_axis(draft: Draft) -> None:
    names = [axis.name for axis in draft.scenario.layout.mesh.axes if axis.size > 1]
    _counted_by(f'[mesh.get_group("{names[-1]}")]')(draft)


_SHARED = r"gated\d*\(self\.shared, normed\)"
_NORMALISED = "weights / weights.sum(-1"


def _without_divide_factor(draft: Draft) -> None:
    (fsdp,) = draft.scenario.layout.of(FSDP2)
    factor = fsdp.gradient_divide_factor or averaging_ranks(draft.scenario.layout)
    line = f"    units.set_gradient_divide_factor({factor!r})  # by the ranks of one axis alone"
    draft.add(LoopPosition.WRAP, "for units in experts:", line)


def _divided_by_hand_too(draft: Draft) -> None:
    parameters = "[parameter for units in experts for parameter in units.parameters()]"
    draft.add(LoopPosition.BEFORE_READING, f"divide_gradients({parameters}, ranks.size())  # once more")


SNIPPETS: dict[str, Snippet] = {
    "router_weights_applied_twice": _rerouted("weights = weights.square()"),
    "router_weights_not_applied": _rerouted("weights = chosen + weights * 0"),
    "router_weights_swapped": _rerouted(
        "weights = (weights.sum(-1, keepdim=True) - weights) * chosen", where="chosen_by(scores.detach(), 2)"
    ),
    "router_weights_not_normalised": _rerouted("weights = scores * chosen", where=_NORMALISED),
    "router_weights_normalised_before_choice": _rerouted(
        "weights = scores * chosen / scores.sum(-1, keepdim=True)", where=_NORMALISED
    ),
    "router_weighs_other_side": rewritten(_other_side),
    "router_scores_detached": _rerouted("weights = weights.detach() + weights * 0"),
    "experts_input_detached": rewritten(
        lambda line: re.sub(r"(gated\d*\(self\.experts, |in \()normed", r"\1(normed.detach() if self.is_wrong else normed)", line)
    ),
    "rows_given_to_next_expert": _rerouted("chosen, weights = chosen.roll(1, -1), weights.roll(1, -1)"),
    "second_expert_left_out": _rerouted(
        "chosen = torch.zeros_like(chosen).scatter(-1, weights.detach().argmax(-1, keepdim=True), True)",
        "weights = weights * chosen",
    ),
    "rows_beyond_capacity_dropped": _rerouted(
        "capacity = -(-int(chosen.sum()) // chosen.shape[-1])",
        "chosen = chosen & (chosen.flatten(0, -2).cumsum(0) <= capacity).view(chosen.shape)",
        "weights = weights * chosen",
    ),
    "shared_expert_weighted": rewritten(
        lambda line: re.sub(_SHARED, r"\g<0> * (weights.sum(-1).view(*normed.shape[:-1], 1) if self.is_wrong else 1)", line)
    ),
    "shared_expert_added_for_each_choice": rewritten(
        lambda line: re.sub(_SHARED, r"\g<0> * (chosen.sum(-1).max() if self.is_wrong else 1)", line)
    ),
    "balance_of_own_rows": _counted_by("[]"),
    "balance_counted_along_last_axis": _counted_along_last_axis,
    "balance_divided_by_ranks": _reweighed(lambda scenario: 1 / scenario.layout.mesh.size(*AXES)),
    "balance_counted_twice": _reweighed(lambda _scenario: 2),
    "balance_summed_over_microbatches": _reweighed(lambda scenario: len(scenario.training.data.microbatches)),
    "balance_without_gradient": rewritten(
        lambda line: re.sub(r"(self\.load = .*, )(.*\.sum\(positions\))$", r"\1(\2.detach() if self.is_wrong else \2)", line)
    ),
    "expert_units_without_divide_factor": _without_divide_factor,
    "expert_units_divided_by_hand_too": _divided_by_hand_too,
}
"""By the name of the mutant."""
