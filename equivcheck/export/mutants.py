"""Mutants in a script: what a hand-written training with that bug would have."""

from __future__ import annotations

from equivcheck.export.bugs import (
    accumulation,
    clipping,
    context_parallel,
    experts,
    gradients,
    labels,
    layers,
    rows,
    stages,
    token_layers,
    updates,
)
from equivcheck.export.bugs.refused import REASONS
from equivcheck.export.bugs.snippet import Snippet
from equivcheck.layouts.base.script.draft import CannotExport, Draft
from equivcheck.mutants.mutant import Mutant
from equivcheck.mutants.optimizer.settings import ChangeOptimizer

SNIPPETS: dict[str, Snippet] = {
    **gradients.SNIPPETS,
    **rows.SNIPPETS,
    **accumulation.SNIPPETS,
    **clipping.SNIPPETS,
    **layers.SNIPPETS,
    **labels.SNIPPETS,
    **token_layers.SNIPPETS,
    **experts.SNIPPETS,
    **context_parallel.SNIPPETS,
    **stages.SNIPPETS,
    **updates.SNIPPETS,
}
"""By the name of the mutant; those that build another optimizer need no lines of their own."""


def plant(draft: Draft, mutant: Mutant) -> None:
    """Put a mutant's bug into a draft whose layout has been written; raises `CannotExport` where no lines are known."""
    if isinstance(mutant.plant, ChangeOptimizer):
        draft.trained = mutant.plant.change(draft.trained)
        return
    snippet = SNIPPETS.get(mutant.name)
    if snippet is None:
        why = f": {REASONS[mutant.name]}" if mutant.name in REASONS else ""
        raise CannotExport(f"mutant {mutant.name!r} cannot be exported{why}; allowed: {', '.join(expressible())}")
    snippet(draft)


def expressible() -> tuple[str, ...]:
    """Names of the mutants that a script can have."""
    from equivcheck.mutants.registry import mutants

    return tuple(name for name, found in mutants().items() if name in SNIPPETS or isinstance(found.plant, ChangeOptimizer))
