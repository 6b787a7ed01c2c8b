"""Tensor programs as nouns: leaves with placements, operations, redistributions. Frozen values; nothing here imports torch."""

from equivcheck.tensor_program.program import TensorProgram
from equivcheck.tensor_program.statements import (
    Constant,
    Contents,
    Leaf,
    Operation,
    Redistribution,
    RoundTrip,
    Statement,
)

__all__ = ["Constant", "Contents", "Leaf", "Operation", "Redistribution", "RoundTrip", "Statement", "TensorProgram"]
