"""All operations by name."""

from __future__ import annotations

from equivcheck.programs.nouns.operations.families.chance import CHANCE
from equivcheck.programs.nouns.operations.families.combining import COMBINING
from equivcheck.programs.nouns.operations.families.elementwise import ELEMENTWISE
from equivcheck.programs.nouns.operations.families.functions import FUNCTIONS
from equivcheck.programs.nouns.operations.families.images import IMAGE
from equivcheck.programs.nouns.operations.families.indexing import INDEXING
from equivcheck.programs.nouns.operations.families.linear_algebra import LINEAR_ALGEBRA
from equivcheck.programs.nouns.operations.families.losses import LOSSES
from equivcheck.programs.nouns.operations.families.making import MAKING
from equivcheck.programs.nouns.operations.families.matmul import MATMUL
from equivcheck.programs.nouns.operations.families.normalisation import NORMALISATION
from equivcheck.programs.nouns.operations.families.optimizers import OPTIMIZERS
from equivcheck.programs.nouns.operations.families.reductions import REDUCTIONS
from equivcheck.programs.nouns.operations.families.views import VIEWS
from equivcheck.programs.nouns.operations.operation import OperationFacts

FAMILIES: dict[str, tuple[OperationFacts, ...]] = {
    "elementwise": ELEMENTWISE,
    "reductions": REDUCTIONS,
    "views": VIEWS,
    "matmul": MATMUL,
    "indexing": INDEXING,
    "combining": COMBINING,
    "normalisation": NORMALISATION,
    "losses": LOSSES,
    "making": MAKING,
    "linear_algebra": LINEAR_ALGEBRA,
    "images": IMAGE,
    "optimizers": OPTIMIZERS,
    "chance": CHANCE,
    "functions": FUNCTIONS,
}
"""Operations by family. Simple families come first."""
OPERATIONS: dict[str, OperationFacts] = {each.name: each for family in FAMILIES.values() for each in family}
"""Operations by name, ordered by family."""
DRAWN: tuple[str, ...] = tuple(each.name for each in OPERATIONS.values() if each.drawn)
"""Operation names for random programs."""
