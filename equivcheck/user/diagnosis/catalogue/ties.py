"""Weights that modules should share, but no longer do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.diverged import DivergedTraining, parameters_by_name
from equivcheck.user.diagnosis.emulated_ranks import EmulatedUserRanks
from equivcheck.user.diagnosis.mistake import Mistake, StepFacts
from equivcheck.user.ranks import build_model


def wrong_sharing(diverged: DivergedTraining, _facts: StepFacts) -> Iterator[Mistake]:
    """Yield models in which one place has a copy of the shared weight, updated separately or never."""
    places: dict[int, list[str]] = {}
    for name, parameter in build_model(diverged.task).named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for first, *others in (names for names in places.values() if len(names) > 1):
        for trained, fate in ((True, "updated on its own"), (False, "never updated")):
            for replaced in (others, [first]) if trained else (others,):
                names = "`, `".join(others)
                words = f"`{first}` and `{names}` are no longer one parameter: `{replaced[0]}` is a copy that is {fate}"
                yield Mistake(Cause.UNTIED, words, partial(_untie, names=replaced, trained=trained))


def _untie(ranks: EmulatedUserRanks, *, names: list[str], trained: bool) -> None:
    for rank, model in enumerate(ranks.models):
        for name in names:
            owner_name, _, key = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            setattr(owner, key, nn.Parameter(getattr(owner, key).detach().clone(), requires_grad=trained))
        ranks.parameters[rank] = parameters_by_name(model)
