"""Former names in scenario JSON. Former names can still be read, but only current names are written."""

from __future__ import annotations

from enum import Enum

from equivcheck.scenario.layers.token_layers import Attention
from equivcheck.scenario.parallelisms.data_parallel import FSDP2, Wrapping
from equivcheck.scenario.parallelisms.tensor_parallel import ActivationSharding, Split

FORMER_VALUES: dict[type[Enum], dict[str, Enum]] = {
    Split: {"column": Split.COLWISE, "row": Split.ROWWISE, "within": Split.HEADS_OR_HIDDEN, "outside": Split.NOT_IN_PLAN},
    ActivationSharding: {"whole": ActivationSharding.REPLICATED},
    Wrapping: {"whole": Wrapping.ROOT_ONLY},
}
"""Current member of each enum, by the member's former value in JSON."""

FORMER_FIELDS: dict[type, dict[str, str]] = {
    Attention: {"heads": "num_heads", "kv_heads": "num_kv_heads", "head_width": "head_dim"},
    FSDP2: {"muon_owners": "distributed_muon"},
}
"""For each class, its current field names by former name."""
