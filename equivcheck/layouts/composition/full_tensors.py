"""Which checks read `full_tensor()`; no torch."""

from __future__ import annotations

from zlib import crc32

from equivcheck.scenario import Scenario

FULL_TENSORS_ONE_IN = 8
"""In one of so many checks `full_tensor()` is read too, at the last step: for large layouts it costs as much as the step."""


def asks_full_tensors(scenario: Scenario) -> bool:
    """Whether a check holds `full_tensor()` against its own reading: by the training's seed, which shrinking can keep."""
    return crc32(scenario.training.seed.to_bytes(8)) % FULL_TENSORS_ONE_IN == 0
