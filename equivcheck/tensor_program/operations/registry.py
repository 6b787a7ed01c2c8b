"""All operations by name."""

from __future__ import annotations

from equivcheck.tensor_program.operations.chance import CHANCE
from equivcheck.tensor_program.operations.combining import COMBINING
from equivcheck.tensor_program.operations.elementwise import ELEMENTWISE
from equivcheck.tensor_program.operations.functions import FUNCTIONS
from equivcheck.tensor_program.operations.images import IMAGE
from equivcheck.tensor_program.operations.indexing import INDEXING
from equivcheck.tensor_program.operations.linear_algebra import LINEAR_ALGEBRA
from equivcheck.tensor_program.operations.losses import LOSSES
from equivcheck.tensor_program.operations.making import MAKING
from equivcheck.tensor_program.operations.matmul import MATMUL
from equivcheck.tensor_program.operations.normalisation import NORMALISATION
from equivcheck.tensor_program.operations.operation import OperationFacts
from equivcheck.tensor_program.operations.optimizers import OPTIMIZERS
from equivcheck.tensor_program.operations.reductions import REDUCTIONS
from equivcheck.tensor_program.operations.views import VIEWS

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
"""Plain ones first."""
OPERATIONS: dict[str, OperationFacts] = {each.name: each for family in FAMILIES.values() for each in family}
"""In the order of their families."""
DRAWN: tuple[str, ...] = tuple(each.name for each in OPERATIONS.values() if each.drawn)
"""What random programs are made of."""
