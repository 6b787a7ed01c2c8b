"""Former names in scenario JSON. They are still read, but only current names are written."""

from __future__ import annotations

from enum import Enum

from equivcheck.scenario.parallelism import Wrapping
from equivcheck.scenario.tensor_parallel import ActivationSharding, Split

FORMER_VALUES: dict[type[Enum], dict[str, Enum]] = {
    Split: {"column": Split.COLUMN, "row": Split.ROW, "within": Split.WITHIN, "outside": Split.OUTSIDE},
    ActivationSharding: {"whole": ActivationSharding.WHOLE},
    Wrapping: {"whole": Wrapping.WHOLE},
}
"""For each enum, members by their former values."""

FORMER_FIELDS: dict[type, dict[str, str]] = {}
"""For each class, current field names by former ones."""
