"""Expert capacity: rows dropped because an expert is full."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from equivcheck.diagnosis.catalogue.counterfactual import Counterfactual, on_emulated_ranks
from equivcheck.diagnosis.catalogue.experts.routing import Routed, choices, module_of, named, routing
from equivcheck.diagnosis.diverged_run import DivergedRun
from equivcheck.diagnosis.emulation.emulated_ranks import EmulatedRanks
from equivcheck.oracle.verdict.cause import Cause

CAPACITY_FACTORS = (1.0, 1.25, 1.5, 2.0)
"""Usual capacity factors."""


def dropped_rows(diverged: DivergedRun) -> Iterator[Counterfactual]:
    """Each rank drops rows over an expert's capacity, in all layers or in one."""
    for layers in choices(diverged) if diverged.can_be_emulated else ():
        for factor in CAPACITY_FACTORS:
            words = f"in {named(layers)} each expert drops a rank's rows beyond capacity factor {factor:g}"
            change = partial(_dropping, layers=layers, factor=factor)
            yield on_emulated_ranks(diverged, Cause.EXPERT_CHOICE, words, change)


def _dropping(ranks: EmulatedRanks, *, layers: tuple[int, ...], factor: float) -> None:
    for setup in ranks.setups:
        for layer in layers:
            module = module_of(setup, layer)
            routing(module, route=partial(_first_rows, share=factor * module.layer.top_k / module.layer.num_experts))


def _first_rows(_scores: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, share: float) -> Routed:
    """Keep each expert's first rows, up to its capacity."""
    flat = chosen.reshape(-1, chosen.shape[-1])
    kept = chosen & (flat.cumsum(0) <= math.ceil(share * len(flat))).reshape(chosen.shape)
    return kept, weights * kept
