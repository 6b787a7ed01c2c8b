"""Decides which checks also read `full_tensor()`. No torch."""

from __future__ import annotations

from zlib import crc32

from equivcheck.scenario import Scenario

FULL_TENSORS_ONE_IN = 8
"""One check in eight also reads `full_tensor()` at the last step. For large layouts, reading it takes as long as the step."""


def asks_full_tensors(scenario: Scenario) -> bool:
    """Whether to compare DTensor's `full_tensor()` with the full tensor that equivcheck assembles from shards.

    The decision depends only on the training's seed. A smaller scenario with this seed gets the same decision.
    """
    return crc32(scenario.training.seed.to_bytes(8)) % FULL_TENSORS_ONE_IN == 0
