"""Tensor programs as frozen values: leaves with placements, operations, redistributions. Nothing here imports torch."""

from equivcheck.programs.nouns.file_format import case_from_json, program_from_json, program_to_json
from equivcheck.programs.nouns.program import (
    Constant,
    Contents,
    Leaf,
    Operation,
    Redistribution,
    RoundTrip,
    Statement,
    TensorProgram,
)

__all__ = [
    "Constant",
    "Contents",
    "Leaf",
    "Operation",
    "Redistribution",
    "RoundTrip",
    "Statement",
    "TensorProgram",
    "case_from_json",
    "program_from_json",
    "program_to_json",
]
