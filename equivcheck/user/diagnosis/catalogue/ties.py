"""Weights that modules should share, but no longer do."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from equivcheck.oracle.verdict.cause import Cause
from equivcheck.user.diagnosis.counterfactual import Change, Counterfactual, Honest
from equivcheck.user.diagnosis.diverged import DivergedTraining, named
from equivcheck.user.diagnosis.emulated_ranks import EmulatedRanks
from equivcheck.user.ranks import build


def wrong_sharing(diverged: DivergedTraining, _honest: Honest) -> Iterator[Counterfactual]:
    """Yield models in which one place has a copy of the shared weight, updated separately or never."""
    for first, others in _shared(build(diverged.task)):
        for trained, fate in ((True, "updated on its own"), (False, "never updated")):
            for replaced in (others, (first,)) if trained else (others,):
                words = (
                    f"`{first}` and `{'`, `'.join(others)}` are no longer one parameter: `{replaced[0]}` is a copy that is {fate}"
                )
                yield Counterfactual(cause=Cause.UNTIED, sentence=words, change=_apart(replaced, trained=trained))


def _shared(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return ((names[0], tuple(names[1:])) for names in places.values() if len(names) > 1)


def _apart(names: tuple[str, ...], *, trained: bool) -> Change:
    def change(ranks: EmulatedRanks) -> None:
        for rank, model in enumerate(ranks.models):
            for name in names:
                owner_name, _, key = name.rpartition(".")
                owner = model.get_submodule(owner_name)
                copy = nn.Parameter(getattr(owner, key).detach().clone(), requires_grad=trained)
                setattr(owner, key, copy)
            ranks.parameters[rank] = named(model)

    return change
