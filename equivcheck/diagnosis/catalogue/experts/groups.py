"""Mistakes in the groups of rows that `grouped_mm` multiplies by each expert's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import changing_layers, on_emulated_ranks
from equivcheck.diagnosis.catalogue.experts.routing import choices
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.scenario_ranks import ScenarioRanks
from equivcheck.diagnosis.mistake import Mistake
from equivcheck.diagnosis.words import layers_by_name
from equivcheck.oracle.verdict.cause import Cause
from equivcheck.scenario import Experts
from equivcheck.training.layers.experts.module import ExpertsModule

NOT_CUMULATIVE = "the offsets of `grouped_mm` are the numbers of rows for each expert, not their running total"


def wrong_groups(diverged: DivergedRun) -> Iterator[Mistake]:
    """Yield mistakes in the offsets for `grouped_mm`. They are tried in all layers that use it, then in each layer alone."""
    if not diverged.can_be_emulated or diverged.rounding is not None:
        return
    for layers in choices(diverged, is_grouped):
        sentence = f"in {layers_by_name(layers)} {NOT_CUMULATIVE}"
        yield on_emulated_ranks(Cause.EXPERT_ROWS, sentence, partial(_changing, layers=layers))


def is_grouped(layer: Experts) -> bool:
    """Whether ranks compute the layer's experts by `grouped_mm`."""
    return layer.grouped


def experts_by_sizes(counts: torch.Tensor) -> torch.Tensor:
    """Return the expert for each row if `counts`, the numbers of rows for each expert, are used as offsets. -1 is no expert."""
    experts, start = torch.full((int(counts.sum()),), -1), 0
    for expert, end in enumerate(counts.tolist()):
        experts[start:end], start = expert, end
    return experts


def _changing(ranks: ScenarioRanks, *, layers: tuple[int, ...]) -> None:
    for setup in ranks.setups:
        changing_layers(layers, ExpertsModule, _with_sizes_as_offsets)(setup)


def _with_sizes_as_offsets(module: ExpertsModule) -> None:
    module.compute_units = partial(_compute_units, module.compute_units)  # type: ignore[method-assign]


def _compute_units(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    experts = experts_by_sizes(counts)
    order = experts.argsort(stable=True)[int((experts < 0).sum()) :]
    made = compute(rows[order], experts[order].bincount(minlength=len(counts)))
    return torch.zeros_like(rows).index_copy(0, order, made)
